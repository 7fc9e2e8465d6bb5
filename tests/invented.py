"""Small invented clusters, layouts and a problem for tests of the cost model."""

from __future__ import annotations

from drawn_problems import problem_for

from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.problem import Group, Layout, Problem, Replica

MODEL = ModelSpec(layers=1, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=100)
SHAPE = ModelSpec(layers=2, hidden=512, heads=8, kv_heads=4, ffn=1024, vocab=1000)
CARD = {
    "dense_tflops": 1,
    "memory_gb": 10,
    "network_gb_per_s": 1e9,  # as good as free
    "efficiency": {"gemm": 1, "attention_forward": 0.5, "attention_backward": 0.25},
}


def cluster_of(count: int, nodes: int = 1, **card: float) -> Cluster:
    """Return `nodes` nodes of `count` equal GPUs, at 1 TFLOP/s and free links unless told."""
    return cluster_of_nodes(["card"] * count, count=nodes, **card)


def cluster_of_nodes(
    gpus: list[str], count: int = 1, intra_gb_per_s: float | None = None, **card: float
) -> Cluster:
    """Return `count` nodes of these GPUs: "card", or "half", which computes half as fast."""
    node = {"name": "n", "gpus": gpus, "count": count, "intra_gb_per_s": intra_gb_per_s}
    latency = {"intra_latency_us": 1e-9, "inter_latency_us": 1e-9}
    cards = {"card": CARD | card, "half": CARD | {"dense_tflops": 0.5} | card}
    return Cluster.from_mapping({"nodes": [node | latency], "gpus": cards})


def mixed(seq_len: int = 1 << 15, network_gb_per_s: float = 2.0, **workload: int) -> Problem:
    """Return two nodes of two whole and two half cards each, and a batch of 4."""
    cluster = cluster_of_nodes(
        ["card", "card", "half", "half"],
        count=2,
        intra_gb_per_s=20.0,
        network_gb_per_s=network_gb_per_s,
    )
    return problem_for(cluster, SHAPE, seq_len=seq_len, **({"global_batch": 4} | workload))


def one_replica(*groups: Group, arrangement: str = "balanced", passes: int = 8) -> Layout:
    """Return one replica of `groups`, with one sequence in each of `passes` passes."""
    return Layout("", (Replica(groups),), passes, arrangement)  # type: ignore[arg-type]


def one_each(*tokens: int, arrangement: str = "balanced", passes: int = 8) -> Layout:
    """Return groups of one with all 4 heads of MODEL."""
    groups = (Group((rank,), (count,), (4,)) for rank, count in enumerate(tokens))
    return one_replica(*groups, arrangement=arrangement, passes=passes)
