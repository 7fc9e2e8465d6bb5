"""Measure the cluster that torchrun started us on: what GPUs compute, how they reach each other.

All ranks measure at the same time, each its own GPU; links are measured by all together. What comes
out is a cluster file (`cluster_file`), which `hexiseq plan --cluster` reads.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hexiseq_triton.channel import Channel
from hexiseq_triton.context import SM_MARGIN, ParallelContext
from hexiseq_triton.errors import ConfigError
from hexiseq_triton.planner.memory import COMMUNICATOR_BYTES, CONTEXT_BYTES
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.overlap import Overlap
from hexiseq_triton.profiling.classes import GpuClass, RankProfile, classes_of
from hexiseq_triton.profiling.clock import median_seconds
from hexiseq_triton.profiling.compute import (
    AttentionCalls,
    Rate,
    attention_rates,
    copy_bytes_per_s,
    token_wise_rates,
)
from hexiseq_triton.profiling.exchanging import even_ring, exchanging_seconds
from hexiseq_triton.profiling.fetching import keys_channel
from hexiseq_triton.profiling.links import (
    Link,
    measured_links,
    measured_overlap,
    pair_rounds,
    ragged_all_to_all,
)
from hexiseq_triton.tracing.observe import device_name

if TYPE_CHECKING:
    from hexiseq_triton.emulation.emulate import Emulation

HELD_BYTES = CONTEXT_BYTES + COMMUNICATOR_BYTES
"""What the memory model sets aside for CUDA's context and NCCL, which are there by now."""


@dataclass(frozen=True)
class Sizes:
    """What is measured: rows of token-wise work, lengths of documents, bytes of messages.

    Attention is measured with `heads` query heads or a few more, as many on a KV head as in the
    model. Each computation is repeated for about `budget_seconds`.
    """

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    heads: int
    copy_bytes: int
    message_bytes: tuple[int, ...]
    all_to_all_bytes: int
    budget_seconds: float


GPU_SIZES = Sizes(
    rows=(2048, 8192, 24576),
    lengths=(4096, 16384, 49152),
    heads=32,  # fewer leave multiprocessors idle on documents of 4,096 tokens
    copy_bytes=2**30,
    message_bytes=(2**16, 2**20, 2**24, 2**26),
    all_to_all_bytes=2**29,
    budget_seconds=0.8,
)
CPU_SIZES = Sizes(
    rows=(64,),
    lengths=(128,),
    heads=2,
    copy_bytes=2**22,
    message_bytes=(2**10, 2**16, 2**19),
    all_to_all_bytes=2**20,
    budget_seconds=0.02,
)
"""Small enough for tests: such figures describe this machine's CPU, and only roughly."""

Step = Callable[[str], None]
"""Told what was just measured."""


@dataclass(frozen=True)
class AllToAll:
    """A ragged all-to-all: measured, and what the fitted links say of it."""

    seconds: float
    predicted_seconds: float

    @property
    def ratio(self) -> float:
        return self.seconds / self.predicted_seconds


@dataclass(frozen=True)
class ClusterProfile:
    """What was measured.

    `hosts` are in rank order; `links` hold each rank's link to every other one. `all_to_all` is
    None for one rank, `overlap` on CPUs too.
    """

    hosts: tuple[str, ...]
    classes: tuple[GpuClass, ...]
    lines: tuple[str, ...]
    links: tuple[dict[int, Link], ...]
    all_to_all: AllToAll | None
    overlap: Overlap | None
    model: str
    seconds: float

    def link(self, rank: int, *, in_node: bool) -> Link | None:
        """Return the median of a rank's links in its node, or to other nodes; None if none."""
        found = [
            link
            for peer, link in self.links[rank].items()
            if (self.hosts[peer] == self.hosts[rank]) == in_node
        ]
        if not found:
            return None
        return Link(
            median(link.latency_seconds for link in found),
            median(link.bytes_per_s for link in found),
        )


def num_steps(sizes: Sizes, head_dims: Sequence[int], world: int) -> int:
    """Return how often `profile` calls its `step`."""
    compute = 2 * len(sizes.rows) + 2 * len(sizes.lengths) * len(head_dims) + 1
    return compute + (len(pair_rounds(world)) + 2 if world > 1 else 0)


def profile(
    device: torch.device,
    model: str,
    head_dims: Sequence[int],
    sizes: Sizes,
    *,
    emulated: str = "",
    emulation: Emulation | None = None,
    step: Step = lambda _: None,
) -> ClusterProfile:
    """Measure; a collective call of all processes, which returns the same on each.

    Args:
        device: this process's.
        model: a preset or file: its layer is the token-wise work.
        head_dims: head dimensions of attention.
        sizes: what to measure.
        emulated: this rank's label, if something is emulated.
        emulation: what is emulated: it caps memory, and delays links.
        step: told of each measurement.

    Raises:
        ConfigError: if the ranks of a host don't count up, or no head dimension is given.
    """
    if not head_dims:
        raise ConfigError("--head-dims is empty; give one or several, such as 64,128")
    began = time.perf_counter()
    world = dist.get_world_size()
    memory = free_memory_bytes(device)
    if emulation is not None and emulation.memory_gb is not None:
        memory = min(memory, emulation.memory_gb[dist.get_rank()] * 1e9 + HELD_BYTES)
    spec = ModelSpec.load(model)
    rates = tuple(_rates(spec, head_dims, sizes, device, step))
    copied = copy_bytes_per_s(sizes.copy_bytes, device, sizes.budget_seconds)
    step("memory")
    own = RankProfile(
        dist.get_rank(),
        socket.gethostname(),
        device_name(device),
        memory,
        copied,
        rates,
        emulated,
    )
    links, all_to_all, overlap = _transfers(spec, head_dims[0], sizes, device, emulation, step)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, (own, links))
    profiles = [entry[0] for entry in everyone]
    hosts = tuple(each.host for each in profiles)
    _check_order(hosts)
    classes, lines = classes_of(profiles)
    return ClusterProfile(
        hosts=hosts,
        classes=tuple(classes),
        lines=tuple(lines),
        links=tuple(entry[1] for entry in everyone),
        all_to_all=all_to_all,
        overlap=overlap,
        model=model,
        seconds=time.perf_counter() - began,
    )


def _rates(
    spec: ModelSpec, head_dims: Sequence[int], sizes: Sizes, device: torch.device, step: Step
) -> Iterator[Rate]:
    for rate in token_wise_rates(spec, sizes.rows, device, sizes.budget_seconds):
        yield rate
        step(f"token-wise, {rate.tokens} rows")
    for head_dim in head_dims:
        for length in sizes.lengths:
            calls = AttentionCalls(head_dim, length, *attention_heads(spec, sizes), device)
            for rate in attention_rates(calls, sizes.budget_seconds):
                yield rate
                step(f"attention, head dim {head_dim}, {length} tokens")


def _transfers(
    spec: ModelSpec,
    head_dim: int,
    sizes: Sizes,
    device: torch.device,
    emulation: Emulation | None,
    step: Step,
) -> tuple[dict[int, Link], AllToAll | None, Overlap | None]:
    """Return this rank's links, and how transfers do among all ranks and beside attention."""
    if dist.get_world_size() == 1:
        return {}, None, None
    overlap = None
    length, heads = sizes.lengths[-1], attention_heads(spec, sizes)
    with even_ring(length, *heads, device) as context:
        if emulation is not None:
            emulation.delay_links(context)
        channel = keys_channel(context, sizes.message_bytes[-1])
        links = measured_links(channel, sizes.message_bytes, device, step)
        all_to_all = _all_to_all(context.routes, sizes, links, device)
        step("all-to-all")
        if device.type == "cuda":
            calls = AttentionCalls(head_dim, length, *heads, device)
            overlap = _overlap(context, channel, calls, sizes)
        step("overlap")
    return links, all_to_all, overlap


def attention_heads(spec: ModelSpec, sizes: Sizes) -> tuple[int, int]:
    """Return query heads and KV heads to measure with."""
    q_per_kv = spec.heads // spec.kv_heads
    kv_heads = -(-sizes.heads // q_per_kv)
    return kv_heads * q_per_kv, kv_heads


def _all_to_all(
    channel: Channel, sizes: Sizes, links: dict[int, Link], device: torch.device
) -> AllToAll:
    """Return the slowest rank's all-to-all beside what its links say."""
    seconds, num_bytes = ragged_all_to_all(channel, sizes.all_to_all_bytes, device)
    typical = Link(
        median(link.latency_seconds for link in links.values()),
        median(link.bytes_per_s for link in links.values()),
    )
    found = torch.tensor([seconds, typical.seconds(num_bytes)], device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return AllToAll(*found.tolist())


def _overlap(
    context: ParallelContext, channel: Channel, calls: AttentionCalls, sizes: Sizes
) -> Overlap:
    """Return how attention and transfers slow each other, on average over the ranks."""
    device = context.device
    alone = sum(
        median_seconds(call, device, sizes.budget_seconds)
        for call in (calls.forward, calls.backward)
    )
    slowdowns = measured_overlap(
        channel, partial(calls.forward, SM_MARGIN), sizes.message_bytes[-1], device
    )
    own = exchanging_seconds(context, calls.shape[-1], torch.bfloat16)
    longer = max(0.0, own / (alone / dist.get_world_size()) - 1)
    found = torch.tensor([*slowdowns, longer], device=device)
    dist.all_reduce(found)
    return Overlap(*(found / dist.get_world_size()).tolist())


def free_memory_bytes(device: torch.device) -> float:
    """Return what a process may fill: free memory of its GPU, or its share of the host's.

    CUDA's context and NCCL are there already; the planner counts them, so they are added.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return float(min(total, free + HELD_BYTES))
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return whole / int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def _check_order(hosts: Sequence[str]) -> None:
    """Raise unless the ranks of each host stand together: cluster files number ranks so."""
    changes = [host for i, host in enumerate(hosts) if i == 0 or host != hosts[i - 1]]
    if len(set(changes)) < len(changes):
        raise ConfigError(
            f"the ranks lie on hosts {', '.join(hosts)} in this order; number them host by host, "
            "as torchrun does with --rdzv-backend=static and --node-rank"
        )
