"""A plan bound to live process groups: passed as an argument, any number in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cached_property
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store

from hexiseq_triton.agreement import Agreement, listed
from hexiseq_triton.call_agreement import CallAgreement
from hexiseq_triton.communicators import make_communicators
from hexiseq_triton.devices import DeviceReport, describe_device, local_device, place
from hexiseq_triton.environment import settle_environment, start_world
from hexiseq_triton.errors import HexiSeqError, InputError, PeerError, PlanError
from hexiseq_triton.exchange import MessageRoutes
from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.loss import mean_of_ranks, with_gradient
from hexiseq_triton.mapper import Mapper
from hexiseq_triton.peer_memory import PeerMemory, open_peer_memory
from hexiseq_triton.peer_routes import PeerRoutes, open_peer_routes
from hexiseq_triton.planner import Plan
from hexiseq_triton.shard import LocalBatch, shard, unshard
from hexiseq_triton.slow_start import told_if_slow
from hexiseq_triton.timeline import Timeline
from hexiseq_triton.wording import counted

DEFAULT_TIMEOUT = timedelta(minutes=10)
SM_MARGIN = 8
"""What `hexiseq profile` tries as `sm_margin`: multiprocessors for NCCL's kernels."""
_FAULT_PATIENCE = timedelta(seconds=2)
_names = count()  # contexts are made in the same order on every rank
_open: list[ParallelContext] = []
"""Contexts of this process that are not closed, in the order they were made in."""


def init(
    plan: Plan | str | Path,
    *,
    device: torch.device | str | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    remap: bool = False,
    symmetric_memory: bool = True,
) -> ParallelContext:
    """Bind a plan to the running processes; a collective call of all ranks.

    Initialises torch.distributed from torchrun's environment if that has not been done, makes the
    device PyTorch's current one, and sets what `hexiseq_triton/environment.py` lists where the
    environment leaves it open.

    Args:
        plan: a plan or its file.
        device: this process's device; left out, its local GPU, else the CPU. "cuda" alone is the
            local GPU too.
        timeout: how long a rank waits for another before it raises.
        remap: let processes run ranks in another order where the devices ask for it.
        symmetric_memory: let the ranks of a group, and those of a replica, that are on one host
            use each other's memory where they can; False sends all by NCCL.

    Raises:
        ConfigError: if this host has no such device, or torchrun did not start this process.
        PlanError: the same on every rank, if ranks hold different plans, the world has another
            size, a file is wrong on any rank, or the devices are not those of the plan.
        PeerError: if a rank does not come.
    """
    name = next(_names)  # whatever fails on this rank, its next context is the others' next too
    settle_environment()
    owns_world = not dist.is_initialized()
    agreement: Agreement | None = None
    try:
        if not owns_world:  # others may wait there already
            agreement = _agreement(name, timeout)
        chosen = local_device(device)
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)  # whose streams the exchange lets wait
        if agreement is None:
            start_world(chosen, timeout, f"of context {name}")
            agreement = _agreement(name, timeout)
        agreed, world_ranks = _agree_on_plan(plan, chosen, agreement, remap)
        context = ParallelContext(agreed, chosen, timeout, agreement, world_ranks, owns_world)
        if symmetric_memory:
            context.share_memory(timeout)
        _open.append(context)
        return context
    except BaseException as error:
        if agreement is not None and not isinstance(error, (PlanError, PeerError)):
            agreement.post_fault(_told(dist.get_rank(), error))  # the others wait for this rank
        if owns_world and dist.is_initialized():
            dist.destroy_process_group()
        raise


def _agreement(name: int, timeout: timedelta) -> Agreement:
    """Return how the ranks agree in a context, over the store of the world that stands."""
    store = dist.PrefixStore(f"hexiseq/{name}", _get_default_store())
    return Agreement(store, dist.get_rank(), timeout)


def _told(rank: int, error: BaseException) -> str:
    """Return what the other ranks are told of an error."""
    return f"rank {rank}: {type(error).__name__}: {error}"


def _agree_on_plan(
    plan: Plan | str | Path, device: torch.device, agreement: Agreement, remap: bool
) -> tuple[Plan, list[int]]:
    """Return the plan all ranks hold and the process of each of its ranks."""
    world = list(range(dist.get_world_size()))
    loaded: Plan | None = None
    try:
        loaded = plan if isinstance(plan, Plan) else Plan.load(plan)
        loaded.validate()
        loaded.check_executable()
        answer = f"plan {loaded.digest}"
    except HexiSeqError as error:
        answer = f"failed: {error}"
    answers = agreement.gather("init", world, answer)
    reports = agreement.gather("devices", world, describe_device(device).to_json())
    failed = {rank: text for rank, text in enumerate(answers) if text.startswith("failed: ")}
    if failed:
        raise PlanError("\n".join(f"rank {rank} {text}" for rank, text in failed.items()))
    if len(set(answers)) > 1:
        held = listed(world, (text[:17] for text in answers))
        raise PlanError(f"ranks hold different plans; give every rank the same file\n{held}")
    assert loaded is not None
    if loaded.world_size != len(world):
        raise PlanError(
            f"the plan is for {counted(loaded.world_size, 'rank')}; {len(world)} "
            f"{'process runs' if len(world) == 1 else 'processes run'}. Start as many (see "
            "`hexiseq launch`) or make a plan for them"
        )
    found = [DeviceReport.from_json(report) for report in reports]
    return loaded, place(loaded, found, remap=remap)


class ParallelContext:
    """What one rank needs to carry the plan out. Made by `init`; use it as a context manager.

    Attributes:
        plan: the plan.
        rank: this process's rank in the plan.
        device: this process's device.
        calls: what the ranks of a replica agree on before they attend.
        timeline: spans of this rank; off until `timeline.enabled = True`.
        sm_margin: multiprocessors that attention leaves to NCCL while keys are under way; 0 until
            it is set.
        peer_memory: memory that the ranks of this rank's group share; None sends messages.
        heads_path: how this rank's head all-to-alls travel, and why; for reports.
        peer_routes: the exchange between groups by memory that the ranks of this rank's replica
            share; None sends messages.
        routes_path: how that exchange travels, and why; for reports.
    """

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        timeout: timedelta,
        agreement: Agreement,
        world_ranks: list[int],
        owns_world: bool,
    ) -> None:
        self.plan = plan
        self.device = device
        self.timeline = Timeline(device)
        self.sm_margin = 0
        self.peer_memory: PeerMemory | None = None
        self.peer_routes: PeerRoutes | None = None
        self.send_messages()
        self.rank = world_ranks.index(dist.get_rank())
        self.replica = plan.replica_of(self.rank)
        self._world_ranks = dict(enumerate(world_ranks))
        self._agreement = agreement
        self._owns_world = owns_world
        self._broken: str | None = None
        self._called: set[str] = set()
        self.calls = CallAgreement(
            self.rank, self.replica, self.replica_ranks, self.gather_in_replica
        )
        made = make_communicators(plan, self.rank, self._world_ranks, device, timeout)
        self.world_group, self.routes, self.heads, self._groups = made

    def share_memory(self, timeout: timedelta) -> None:
        """Let all-to-alls and keys go by peer memory where they can; a call of all ranks."""
        if self.device.type != "cuda":
            return
        group = self.heads.group
        if group is not None:
            self.peer_memory, self.heads_path = open_peer_memory(
                self._mapper(group, "memory"), timeout, "the head all-to-all"
            )
        group = self.routes.group
        if group is not None and self.routes is not self.heads:
            process = {process: rank for rank, process in self._world_ranks.items()}
            ranks = [process[number] for number in dist.get_process_group_ranks(group)]
            self.peer_routes, self.routes_path = open_peer_routes(
                self._mapper(group, "routes"), ranks, self.rank, timeout
            )

    def send_messages(self) -> None:
        """Use no peer memory from here on; for all ranks alike."""
        if self.peer_routes is not None:
            self.peer_routes.close()
        self.peer_memory = self.peer_routes = None
        self.heads_path = self.routes_path = "NCCL" if self.device.type == "cuda" else "gloo"

    def _mapper(self, group: dist.ProcessGroup, name: str) -> Mapper:
        """Return what maps buffers in a group; ranks agree under `name`."""
        ranks = dist.get_process_group_ranks(group)

        def gather(answer: str) -> list[str]:
            return self._agreement.gather(f"{name}/{ranks[0]}", ranks, answer)

        return Mapper(group, self.device, gather, lambda: self._alone)

    @cached_property
    def _alone(self) -> dist.ProcessGroup:
        """A group of this rank, which needs no other to be made."""
        ranks = [dist.get_rank()]
        found: dist.ProcessGroup = dist.new_group(
            ranks, backend="gloo", use_local_synchronization=True
        )
        self._groups.append(found)
        return found

    @property
    def paths(self) -> str:
        """How transfers of this rank's attention travel, and why; for reports."""
        ways = []
        if self.heads.group is not None:
            ways.append(f"head all-to-alls by {self.heads_path}")
        if self.routes is not self.heads:
            ways.append(f"keys by {self.routes_path}")
        return ", ".join(ways) or "nothing travels"

    @property
    def key_routes(self) -> MessageRoutes | PeerRoutes:
        """How keys and their gradients travel between groups."""
        return self.peer_routes or MessageRoutes(self.routes)

    # ---------------------------------------------------------------- what users call

    def shard(
        self,
        batch: Mapping[str, torch.Tensor] | None,
        *,
        cu_seqlens: torch.Tensor | None = None,
        source: int | None = None,
    ) -> LocalBatch:
        """Return this rank's tokens of a batch; see `hexiseq_triton.shard.shard`."""
        with self.guard():
            return shard(self, batch, cu_seqlens=cu_seqlens, source=source)

    def unshard(self, local: torch.Tensor, layout: BatchLayout) -> torch.Tensor:
        """Return the whole replica's rows in their first order; see `shard.unshard`."""
        with self.guard():
            return unshard(self, local, layout)

    def token_mean(
        self, loss_sum: torch.Tensor, num_tokens: int | torch.Tensor, *, grad_average: int
    ) -> torch.Tensor:
        """Return the mean loss over all tokens of all ranks; see `hexiseq_triton.loss`."""
        with self.guard():
            mean = mean_of_ranks(
                loss_sum, num_tokens, grad_average=grad_average, group=self.world_group
            )
        # outside: a recomputing checkpoint may stop here by an exception, which is no fault
        return with_gradient(loss_sum, *mean)

    @cached_property
    def mesh(self) -> DeviceMesh:
        """All ranks as one flat mesh, for FSDP2's `fully_shard`."""
        # DTensor's caches outlive a context, and tell meshes of the same ranks apart by name only
        name = f"world{self.world_group.group_name}"
        return DeviceMesh.from_group(self.world_group, self.device.type, mesh_dim_names=(name,))

    @property
    def replica_ranks(self) -> list[int]:
        """The plan's ranks that share this rank's batch; itself alone for an idle rank."""
        if self.replica is None:
            return [self.rank]
        return [share.rank for share in self.plan.replicas[self.replica].shares]

    def check_layout(self, layout: BatchLayout) -> None:
        """Raise an InputError unless this context made the layout, or one of its plan did."""
        if not isinstance(layout, BatchLayout):
            raise InputError(
                f"layout is a {type(layout).__name__}; pass that of a batch from context.shard"
            )
        if layout.plan is not self.plan or layout.rank != self.rank:
            raise InputError("the layout belongs to another context; use its own context.shard")

    # ---------------------------------------------------------------- agreement and faults

    def gather_in_replica(self, name: str, value: str) -> list[str]:
        """Return every replica rank's value for `name`, the same list on all of them."""
        ranks = [self._world_ranks[rank] for rank in self.replica_ranks]
        where = f"idle {self.rank}" if self.replica is None else self.replica
        return self._agreement.gather(f"{name}/{where}", ranks, value)

    def gather(self, name: str, value: str) -> list[str]:
        """Return every rank's value for `name`, in the plan's order; the same list on all ranks."""
        return self._agreement.gather(name, list(self._world_ranks.values()), value)

    def first_call(self, direction: str) -> AbstractContextManager[None]:
        """Return what explains the first forward or backward on a GPU if it takes long.

        One rank of the plan speaks for all.
        """
        if direction in self._called:
            return nullcontext()
        self._called.add(direction)
        speaks = self.replica == 0 and self.rank == self.replica_ranks[0]
        return told_if_slow(direction) if speaks and self.device.type == "cuda" else nullcontext()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Post what goes wrong inside to the other ranks; say what they said first.

        After a fault the communicators are in no known state, so every later call raises it again.
        """
        if self._broken is not None:
            raise PeerError(f"this context failed before: {self._broken}")
        if not self._groups:
            raise InputError("this context is closed, its groups are gone; make another with init")
        try:
            yield
        except PeerError as error:
            self._broken = self._agreement.fault(_FAULT_PATIENCE) or str(error)
            self._agreement.post_fault(self._broken)
            raise PeerError(self._broken) from error
        except Exception as error:
            self._post(error)
            raise

    def _post(self, error: Exception) -> None:
        self._broken = _told(self.rank, error)
        self._agreement.post_fault(self._broken)

    # ---------------------------------------------------------------- life

    def __deepcopy__(self, memo: dict[int, object]) -> ParallelContext:
        """Return itself: copies of a model, an average of its weights say, run in these groups."""
        return self

    def __reduce__(self) -> NoReturn:
        raise InputError(
            "a context is bound to live processes and cannot be pickled; save model.state_dict() "
            "and not the model"
        )

    def close(self) -> None:
        """Destroy the groups, and torch.distributed if `init` initialised it for this context.

        Where contexts made later still use it, the last of them to close destroys it.
        """
        if self.peer_routes is not None:
            self.peer_routes.close()
        groups, self._groups = self._groups, []
        for group in groups:
            dist.destroy_process_group(group)
        later = self._leave_open()
        if self._owns_world and later:
            later[0]._owns_world = True
        elif self._owns_world and groups:
            dist.destroy_process_group()

    def _leave_open(self) -> list[ParallelContext]:
        """Count this context as closed; return those that were made after it."""
        if self not in _open:
            return []
        place = _open.index(self)
        del _open[place]
        return _open[place:]

    def __enter__(self) -> ParallelContext:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception) and self._broken is None:
            self._post(error)  # the others wait for this rank in their next call
        self.close()
