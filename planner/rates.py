"""What every rank of a cluster can do, as arrays over ranks: the numbers the cost model runs on.

A rate of computing is one measured on the GPU, for the head dim and length at hand, or else the
peak times the share of it that real kernels reach. Rates of links are nominal ones times a share:
assumed until measured, from NCCL's reports of 75 % of NVLink in a node, 80 % of a NIC for
point-to-point transfers and collectives in a ring, and 50 % of it for all-to-all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from hexiseq_triton.planner.clusters import Cluster, Device
from hexiseq_triton.planner.gpus import Figure, GpuSpec
from hexiseq_triton.planner.overlap import ASSUMED, Overlap

IN_NODE_SHARE = 0.75
ACROSS_SHARE = 0.8
ACROSS_ALL_TO_ALL_SHARE = 0.5
MEMORY_LIMIT_SHARE = 0.95
COMPUTE_SLOWDOWN, TRANSFER_SLOWDOWN = ASSUMED.compute_slowdown, ASSUMED.transfer_slowdown
"""How computing and a transfer slow each other where nobody measured it."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Seconds = TypeVar("Seconds", float, Floats)
Computing = Literal["gemm_forward", "gemm_backward", "attention_forward", "attention_backward"]
COMPUTING: tuple[Computing, ...] = (
    "gemm_forward",
    "gemm_backward",
    "attention_forward",
    "attention_backward",
)


def together(
    computing: Seconds, transfer: Seconds | float, overlap: Overlap = ASSUMED
) -> tuple[Seconds, Seconds]:
    """Return how long computing and a transfer take when both begin at once.

    Each is slowed by the other while both last. Both results rise with both arguments.
    """
    both: Seconds = np.minimum(computing, transfer)
    return (
        computing + overlap.compute_slowdown * both,
        transfer + overlap.transfer_slowdown * both,
    )


@dataclass(frozen=True)
class Rates:
    """Arrays over ranks: FLOP/s, bytes/s one way, seconds of latency, bytes of memory."""

    gemm_forward: Floats
    gemm_backward: Floats
    attention_forward: Floats
    attention_backward: Floats
    memory: Floats
    in_node: Floats
    across: Floats
    across_all_to_all: Floats
    in_node_latency: Floats
    across_latency: Floats
    memory_limit: Floats
    node: Ints
    """Index of the rank's node."""
    shares_port: NDArray[np.bool_]
    """Whether traffic across nodes passes the port that traffic in the node uses."""
    overlap: Overlap = ASSUMED

    @cached_property
    def seconds_per_sharded_byte(self) -> float:
        """Seconds for each byte that all ranks together gather, or reduce-scatter.

        Shards are even. A rank passes on all but its own inside the node; a node's NICs together
        take in what other nodes hold.
        """
        world, sizes = len(self.node), np.bincount(self.node)
        seconds = float(self.nic_seconds_per_sharded_byte.max())
        if sizes.max() > 1:
            inside = (world - 1) / world / self.in_node[sizes[self.node] > 1]
            seconds = max(seconds, float(inside.max()))
        return seconds

    @cached_property
    def nic_seconds_per_sharded_byte(self) -> Floats:
        """[ranks], how long each rank's NIC is at work for it."""
        world, sizes = len(self.node), np.bincount(self.node)
        node_rates = np.bincount(self.node, weights=self.across)
        result: Floats = ((world - sizes) / world / node_rates)[self.node]
        return result


def rates_of(
    cluster: Cluster,
    head_dim: int,
    document_tokens: int,
    rank_tokens: int,
    memory_limit_share: float = MEMORY_LIMIT_SHARE,
) -> Rates:
    """Return what the ranks of a cluster reach.

    Args:
        cluster: whose ranks.
        head_dim: of the attention.
        document_tokens: of the longest document, for attention's length bin.
        rank_tokens: tokens that a rank holds about, for the length bin of matrix products.
        memory_limit_share: how much of a GPU's memory may be used.
    """
    devices = cluster.devices
    gpus = [cluster.gpus[device.gpu] for device in devices]
    reached = {
        work: {
            name: computing_rate(
                gpu, work, head_dim, rank_tokens if work.startswith("gemm") else document_tokens
            ).value
            for name, gpu in cluster.gpus.items()
        }
        for work in COMPUTING
    }
    nodes = {node: index for index, node in enumerate(cluster.ranks_by_node)}
    across = np.array([device.across_gb_per_s * 1e9 for device in devices])
    in_node = np.array([device.in_node_gb_per_s * 1e9 for device in devices])
    return Rates(
        **{work: np.array([rate[d.gpu] for d in devices]) for work, rate in reached.items()},
        memory=np.array([gpu.rate("memory").value for gpu in gpus]),
        in_node=in_node * IN_NODE_SHARE,
        across=across * ACROSS_SHARE,
        across_all_to_all=across * ACROSS_ALL_TO_ALL_SHARE,
        in_node_latency=np.array([device.in_node_latency_us * 1e-6 for device in devices]),
        across_latency=np.array([device.across_latency_us * 1e-6 for device in devices]),
        memory_limit=np.floor([gpu.memory_gb.value * 1e9 * memory_limit_share for gpu in gpus]),
        node=np.array([nodes[device.node] for device in devices]),
        shares_port=np.array([_shares_port(cluster, device) for device in devices]),
        overlap=cluster.overlap or ASSUMED,
    )


def _shares_port(cluster: Cluster, device: Device) -> bool:
    """Return whether all of a GPU's traffic takes one port, that of PCIe: it has no other link.

    Without NVLink the node's rate tells. If transfers reach more than the GPU's own link carries,
    there is another one, a bridge; else it is the same link, as measured or over a longer path.
    """
    gpu = cluster.gpus[device.gpu]
    own = gpu.in_node_gb_per_s
    if gpu.nvlink_gb_per_s is not None or own is None:
        return False
    return device.in_node_gb_per_s * IN_NODE_SHARE <= own


def computing_rate(gpu: GpuSpec, work: Computing, head_dim: int, tokens: int) -> Figure:
    """Return a GPU's FLOP/s in one kind of work, measured if it has been.

    Of the measured rates for this head dim (or for all), the one from the most tokens on that are
    not above `tokens` counts; below all of them, the one from the fewest.
    """
    measured = [
        rate for rate in gpu.rates if rate.work == work and rate.head_dim in (None, head_dim)
    ]
    if not measured:
        return gpu.rate("gemm" if work.startswith("gemm") else work)  # type: ignore[arg-type]
    reached = [rate for rate in measured if rate.tokens <= tokens]
    best = (
        max(reached, key=lambda rate: (rate.tokens, rate.head_dim is not None))
        if reached
        else min(measured, key=lambda rate: (rate.tokens, rate.head_dim is None))
    )
    return Figure(best.tflops.value * 1e12, best.tflops.origin, best.tflops.source)
