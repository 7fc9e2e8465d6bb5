"""What a layer takes in the simulator, over links that are all there is to wait for."""

from __future__ import annotations

from invented import cluster_of_nodes

from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.cost import Cost
from hexiseq_triton.planner.simulator import layer_seconds

RINGS = ("lockstep", "async", "streamed")


def slow_links(nodes: int, gpus: int = 1) -> Cluster:
    """Return nodes whose GPUs compute in no time; a NIC carries 0.8 GB/s, a port in a node 750."""
    cards = ["card"] * gpus
    return cluster_of_nodes(
        cards, count=nodes, intra_gb_per_s=1000, network_gb_per_s=1.0, dense_tflops=1e9
    )


def forward_seconds(cost: Cost, mode: str, engine: str = "event") -> float:
    """Return what one layer's forward takes without FSDP, which would share the links."""
    return layer_seconds(cost, mode=mode, engine=engine)[0]  # type: ignore[arg-type]
