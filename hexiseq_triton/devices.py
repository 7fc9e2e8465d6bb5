"""Which process runs which rank of the plan, checked against the devices the plan was made for."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from hexiseq_triton.errors import ConfigError, PlanError
from hexiseq_triton.planner import Plan, RankShare
from hexiseq_triton.planner.gpus import is_named
from hexiseq_triton.wording import counted


@dataclass(frozen=True)
class DeviceReport:
    """What one process found: its host, its device's name and memory (0 on a CPU)."""

    host: str
    name: str
    memory_bytes: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> DeviceReport:
        return cls(**json.loads(text))


def local_device(device: torch.device | str | None = None) -> torch.device:
    """Return this process's device: what is asked for, else its local GPU, else the CPU.

    "cuda" without a number is the local GPU too: that of torchrun's LOCAL_RANK, or PyTorch's
    current one where nothing says LOCAL_RANK.

    Raises:
        ConfigError: if this host has no such GPU, or the package runs on no such device.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device is {device!r}; it is cuda, cuda:0 or cpu, say") from error
    if chosen.type == "cpu":
        return chosen
    if chosen.type != "cuda":
        raise ConfigError(f"device is {chosen}; the package runs on cuda and cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"device is {chosen}; PyTorch finds no GPU here: leave device out")
    return torch.device("cuda", _local_index() if chosen.index is None else _known(chosen.index))


def _local_index() -> int:
    local = os.environ.get("LOCAL_RANK")
    return torch.cuda.current_device() if local is None else _known(int(local), "LOCAL_RANK")


def _known(index: int, name: str = "the device's number") -> int:
    count = torch.cuda.device_count()
    if index >= count:
        raise ConfigError(
            f"{name} is {index}; PyTorch finds {counted(count, 'GPU')} on {socket.gethostname()}: "
            "start one process a GPU; with CUDA_VISIBLE_DEVICES set to nothing, all run on the CPU"
        )
    return index


def describe_device(device: torch.device) -> DeviceReport:
    """Return the report of this process's device."""
    if device.type != "cuda":
        return DeviceReport(socket.gethostname(), device.type, 0)
    found = torch.cuda.get_device_properties(device)
    return DeviceReport(socket.gethostname(), found.name, found.total_memory)


def place(plan: Plan, reports: Sequence[DeviceReport], *, remap: bool) -> list[int]:
    """Return the process that runs each rank of the plan.

    A CPU runs any rank. A GPU runs ranks planned for its model (where the plan knows the model's
    device names) and for no more memory than it has. Ranks of one node need one host.

    Args:
        plan: the plan.
        reports: the report of each process.
        remap: allow another order than rank = process.

    Raises:
        PlanError: with the plan's table and the found one, if no allowed order fits.
    """
    same = list(range(plan.world_size))
    if _fits(plan, reports, same):
        return same
    found = _remapped(plan, reports) if remap else None
    if found is not None:
        return found
    hint = "no order of the processes fits" if remap else "remap=True allows another order"
    raise PlanError(f"the devices are not those of the plan ({hint})\n{_tables(plan, reports)}")


def _suits(plan: Plan, share: RankShare, report: DeviceReport) -> bool:
    if report.memory_bytes == 0:
        return True
    names = plan.device_names.get(share.gpu or "", ())
    named = not names or is_named(report.name, names)
    return named and report.memory_bytes >= (share.memory_limit_bytes or 0)


def _fits(plan: Plan, reports: Sequence[DeviceReport], world_ranks: Sequence[int]) -> bool:
    hosts: dict[str, set[str]] = {}
    for share in plan.shares:
        report = reports[world_ranks[share.rank]]
        if not _suits(plan, share, report):
            return False
        if share.node is not None:
            hosts.setdefault(share.node, set()).add(report.host)
    return all(len(names) == 1 for names in hosts.values())


def _remapped(plan: Plan, reports: Sequence[DeviceReport]) -> list[int] | None:
    """Place node after node, fullest first, each on the first host whose free devices suit."""
    free = set(range(plan.world_size))
    placed: dict[int, int] = {}
    nodes: dict[str, list[RankShare]] = {}
    for share in plan.shares:
        nodes.setdefault(share.node or f"rank {share.rank}", []).append(share)
    hosts = sorted({report.host for report in reports})
    for shares in sorted(nodes.values(), key=len, reverse=True):
        options = (_on_host(plan, shares, reports, host, free) for host in hosts)
        chosen = next((option for option in options if option is not None), None)
        if chosen is None:
            return None
        placed |= chosen
        free -= set(chosen.values())
    idle = sorted(free)
    return [placed[rank] if rank in placed else idle.pop(0) for rank in range(plan.world_size)]


def _on_host(
    plan: Plan,
    shares: Sequence[RankShare],
    reports: Sequence[DeviceReport],
    host: str,
    free: set[int],
) -> dict[int, int] | None:
    candidates = [process for process in sorted(free) if reports[process].host == host]
    chosen: dict[int, int] = {}
    # the most demanding rank first, so that a larger GPU isn't spent on a smaller share
    for share in sorted(shares, key=lambda s: (-(s.memory_limit_bytes or 0), s.rank)):
        fitting = [process for process in candidates if _suits(plan, share, reports[process])]
        if not fitting:
            return None
        process = min(fitting, key=lambda p: (reports[p].memory_bytes, p))
        candidates.remove(process)
        chosen[share.rank] = process
    return chosen


def _tables(plan: Plan, reports: Sequence[DeviceReport]) -> str:
    lines = ["planned:"]
    for share in sorted(plan.shares, key=lambda s: s.rank):
        limit = _gib(share.memory_limit_bytes or 0)
        lines.append(f"  rank {share.rank}: {share.gpu} on node {share.node}, {limit} needed")
    lines.append("found:")
    for process, report in enumerate(reports):
        memory = _gib(report.memory_bytes)
        lines.append(f"  process {process}: {report.name} on host {report.host}, {memory}")
    return "\n".join(lines)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
