"""What every rank of a cluster can do, as arrays over ranks: the numbers the cost model runs on.

A rate is a peak times the share of it that real kernels or transfers reach. Shares of the links
are assumed here until a cluster is measured: NCCL's reports show 75 % of NVLink in a node, 80 % of
a NIC for point-to-point transfers and collectives in a ring, and 50 % of it for all-to-all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hexiseq_triton.planner.clusters import Cluster

IN_NODE_SHARE = 0.75
ACROSS_SHARE = 0.8
ACROSS_ALL_TO_ALL_SHARE = 0.5
MEMORY_LIMIT_SHARE = 0.95

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Rates:
    """Arrays over ranks: FLOP/s, bytes/s one way, seconds of latency, bytes of memory."""

    gemm: Floats
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


def rates_of(cluster: Cluster) -> Rates:
    """Return what the ranks of a cluster reach."""
    devices = cluster.devices
    gpus = [cluster.gpus[device.gpu] for device in devices]
    reached = {
        work: {name: gpu.rate(work).value for name, gpu in cluster.gpus.items()}
        for work in ("gemm", "attention_forward", "attention_backward", "memory")
    }
    nodes = {node: index for index, node in enumerate(cluster.ranks_by_node)}
    across = np.array([device.across_gb_per_s * 1e9 for device in devices])
    in_node = np.array([device.in_node_gb_per_s * 1e9 for device in devices])
    return Rates(
        **{work: np.array([rate[d.gpu] for d in devices]) for work, rate in reached.items()},
        in_node=in_node * IN_NODE_SHARE,
        across=across * ACROSS_SHARE,
        across_all_to_all=across * ACROSS_ALL_TO_ALL_SHARE,
        in_node_latency=np.array([device.in_node_latency_us * 1e-6 for device in devices]),
        across_latency=np.array([device.across_latency_us * 1e-6 for device in devices]),
        memory_limit=np.floor([gpu.memory_gb.value * 1e9 * MEMORY_LIMIT_SHARE for gpu in gpus]),
        node=np.array([nodes[device.node] for device in devices]),
    )
