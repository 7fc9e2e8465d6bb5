"""Check that the processes torchrun started can work together, before anything long begins.

Reports travel over gloo, which needs TCP alone, so a broken NCCL is a finding and no hang. Problems
stop training or make it wrong; remarks make it slow.
"""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hexiseq_triton.doctor.kernels import KernelPath, kernel_path
from hexiseq_triton.doctor.nccl import NCCL_SETTINGS, NcclLog, read_nccl_log
from hexiseq_triton.profiling.links import pair_rounds
from hexiseq_triton.tracing.observe import device_name

SMOKE_BYTES = 2**20
SMOKE_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class RankReport:
    """What one rank found. `peers` are the local GPUs that its own can read directly."""

    rank: int
    host: str
    device: str
    memory_bytes: int
    versions: dict[str, str]
    peers: tuple[int, ...]
    local_gpus: int
    kernels: KernelPath
    nccl: NcclLog = field(default_factory=NcclLog)
    smoke: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Diagnosis:
    """All reports, what must be fixed, and what is only worth knowing."""

    reports: tuple[RankReport, ...]
    problems: tuple[str, ...]
    remarks: tuple[str, ...]


def examine(device: torch.device) -> Diagnosis:
    """Check everything; a collective call of all processes, over a gloo world that stands.

    Args:
        device: this process's.

    Returns:
        The same on every rank.
    """
    rank = dist.get_rank()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "nccl.log"
        smoke = _smoke(device, log)
        nccl = read_nccl_log(log)
    report = RankReport(
        rank=rank,
        host=socket.gethostname(),
        device=device_name(device),
        memory_bytes=_memory(device),
        versions=versions(device),
        peers=_peers(device),
        local_gpus=torch.cuda.device_count() if device.type == "cuda" else 0,
        kernels=kernel_path(device),
        nccl=nccl,
        smoke=smoke,
    )
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    return diagnosed(reports)


def diagnosed(reports: Sequence[RankReport]) -> Diagnosis:
    """Return what the reports of all ranks come to."""
    problems = [*_version_problems(reports), *_smoke_problems(reports), *_kernel_problems(reports)]
    remarks = [*_peer_remarks(reports), *_nccl_remarks(reports), *_kernel_remarks(reports)]
    return Diagnosis(tuple(reports), tuple(problems), tuple(remarks))


# -------------------------------------------------------------------- one rank's report


def versions(device: torch.device) -> dict[str, str]:
    """Return the versions that all ranks must share."""
    found = {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "hexiseq_triton": f"{_version('hexiseq-triton')} ({source_digest()})",
    }
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["driver"] = _driver()
    return found


def source_digest() -> str:
    """Return a short hash of the package's source: equal versions may differ in a checkout."""
    import hexiseq_triton.kernels
    import hexiseq_triton.planner

    digest = hashlib.sha256()
    for module in (hexiseq_triton, hexiseq_triton.kernels, hexiseq_triton.planner):
        folder = Path(str(module.__file__)).parent
        for path in sorted(folder.rglob("*.py")):
            digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()[:8]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "from source"


def _driver() -> str:
    path = Path("/proc/driver/nvidia/version")
    try:
        words = path.read_text(encoding="utf-8").splitlines()[0].split()
    except OSError:
        return "unknown"
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown")


def _memory(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 0


def _peers(device: torch.device) -> tuple[int, ...]:
    if device.type != "cuda":
        return ()
    own = device.index
    others = (other for other in range(torch.cuda.device_count()) if other != own)
    return tuple(other for other in others if torch.cuda.can_device_access_peer(own, other))


def _smoke(device: torch.device, log: Path) -> dict[int, str]:
    """Return, by peer, how a checked exchange went: seconds, or what went wrong.

    On CUDA a fresh NCCL group does it, whose log goes to `log`.
    """
    if dist.get_world_size() == 1:
        return {}
    if device.type == "cuda":
        os.environ.update(NCCL_SETTINGS | {"NCCL_DEBUG_FILE": str(log)})
        torch.cuda.set_device(device)
    try:
        backend = "nccl" if device.type == "cuda" else "gloo"
        group = dist.new_group(backend=backend, timeout=SMOKE_TIMEOUT)
        ones = torch.ones(1, device=device)
        dist.all_reduce(ones, group=group)
        if int(ones.item()) != dist.get_world_size():
            return {dist.get_rank(): f"an all-reduce of ones gave {ones.item():g}"}
    except RuntimeError as error:
        return {dist.get_rank(): f"{backend} cannot start: {_first_line(error)}"}
    return dict(_exchanges(device, group))


def _exchanges(device: torch.device, group: dist.ProcessGroup) -> Iterator[tuple[int, str]]:
    """Exchange with one peer after the other, up to the first with which that fails.

    Who has waited for a peer is late for the next one: going on would spend a timeout on each.
    """
    rank = dist.get_rank()
    for pairs in pair_rounds(dist.get_world_size()):
        peer = next((a + b - rank for a, b in pairs if rank in (a, b)), None)
        if peer is None:
            continue
        try:
            result = _exchanged(peer, device, group)
        except RuntimeError as error:
            yield peer, _first_line(error)
            return
        yield peer, result


def _exchanged(peer: int, device: torch.device, group: dist.ProcessGroup) -> str:
    rank = dist.get_rank()
    out = torch.full((SMOKE_BYTES,), rank % 251, dtype=torch.uint8, device=device)
    into = torch.empty_like(out)
    seconds = 0.0
    for _ in range(2):  # the first one connects
        into.fill_(255)
        began = time.perf_counter()
        operations = [
            dist.P2POp(dist.isend, out, peer, group),
            dist.P2POp(dist.irecv, into, peer, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        wrong = int((into != peer % 251).sum())  # on CUDA waits for the device
        seconds = time.perf_counter() - began
    return f"{wrong} of {SMOKE_BYTES} bytes arrived wrong" if wrong else f"ok {seconds * 1e3:.2f}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# -------------------------------------------------------------------- what they come to


def _version_problems(reports: Sequence[RankReport]) -> Iterator[str]:
    for name in reports[0].versions:
        ranks_of: dict[str, list[int]] = {}
        for report in reports:
            ranks_of.setdefault(report.versions.get(name, "missing"), []).append(report.rank)
        if len(ranks_of) > 1:
            held = "; ".join(
                f"{held} on rank{'s' * (len(ranks) > 1)} {_ranks(ranks)}"
                for held, ranks in ranks_of.items()
            )
            yield f"{name} differs: {held}. Install the same on every host"


def _smoke_problems(reports: Sequence[RankReport]) -> Iterator[str]:
    for report in reports:
        for peer, result in report.smoke.items():
            if not result.startswith("ok"):
                yield (
                    f"rank {report.rank} ({report.host}) with rank {peer} "
                    f"({reports[peer].host}): {result}. Check that the hosts reach each other and "
                    "that NCCL_SOCKET_IFNAME names the interface they share"
                )


def _kernel_problems(reports: Sequence[RankReport]) -> Iterator[str]:
    for report in reports:
        if report.kernels.problem:
            yield f"rank {report.rank} ({report.device}): {report.kernels.problem}"


def _peer_remarks(reports: Sequence[RankReport]) -> Iterator[str]:
    for report in reports:
        if report.local_gpus > 1 and len(report.peers) < report.local_gpus - 1:
            yield (
                f"rank {report.rank} ({report.host}) reads {len(report.peers)} of its "
                f"{report.local_gpus - 1} neighbours' memory directly: transfers in the node pass "
                "the host's memory; look at `nvidia-smi topo -p2p r`"
            )


def _nccl_remarks(reports: Sequence[RankReport]) -> Iterator[str]:
    several = len({report.host for report in reports}) > 1
    for report in reports:
        if several and report.nccl.network == "Socket":
            yield (
                f"rank {report.rank} ({report.host}): NCCL goes over TCP sockets "
                f"({report.nccl.interface}); with InfiniBand or RoCE there, see to it that NCCL "
                "finds it (NCCL_IB_HCA, NCCL_IB_DISABLE, its network plugin)"
            )


def _kernel_remarks(reports: Sequence[RankReport]) -> Iterator[str]:
    for report in reports:
        if report.kernels.remark:
            yield f"rank {report.rank} ({report.device}): {report.kernels.remark}"


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
