"""Clusters and problems for the planner's tests: the examples', and random ones from a seed."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.plans import ExchangePlan, Plan
from hexiseq_triton.planner.problem import Group, Layout, Problem, Replica
from hexiseq_triton.planner.workload import Workload

EXAMPLES = Path(__file__).parents[1] / "examples" / "clusters"
TWO_AND_TWO = EXAMPLES / "2-fast-2-slow.yaml"
SIXTEEN = EXAMPLES / "8xh100-8xa100.yaml"


def problem_for(
    cluster: Cluster, model: ModelSpec | str, exchange: ExchangePlan | None = None, **workload: Any
) -> Problem:
    """Return a problem; `model` may be a preset's name."""
    model = ModelSpec.load(model) if isinstance(model, str) else model
    return Problem(cluster, model, Workload(**workload), exchange or ExchangePlan())


def step_seconds(result: Plan) -> float:
    assert result.predicted is not None
    return result.predicted.step_seconds


def drawn_cluster(rng: Random, most_nodes: int = 4) -> Cluster:
    """Return up to four nodes of up to four GPUs of three invented models."""
    cards = {
        name: {
            "dense_tflops": rng.uniform(20, 1000),
            "memory_gb": rng.choice([24, 48, 80]),
            "network_gb_per_s": rng.uniform(5, 50),
            "efficiency": {"attention_forward": rng.uniform(0.2, 0.7)},
        }
        for name in ("one", "two", "three")
    }
    nodes = [
        {
            "name": f"n{i}",
            "gpus": rng.choices(sorted(cards), k=rng.randint(1, 4)),
            "intra_gb_per_s": rng.uniform(10, 400),
        }
        for i in range(rng.randint(1, most_nodes))
    ]
    return Cluster.from_mapping({"nodes": nodes, "gpus": cards})


def drawn_problem(rng: Random) -> Problem:
    """Return a cluster with a small model, compute-bound or communication-bound."""
    return problem_for(
        drawn_cluster(rng),
        ModelSpec(
            layers=rng.randint(1, 4),
            hidden=rng.choice([256, 1024]),
            heads=12,
            kv_heads=rng.choice([2, 6, 12]),
            head_dim=64,
            ffn=1024,
            vocab=1000,
        ),
        seq_len=rng.choice([500, 4096, 65536]),
        global_batch=rng.choice([1, 6, 8]),
        causal=rng.random() < 0.8,
    )


def drawn_layout(rng: Random, problem: Problem) -> Layout:
    """Return any balanced layout: any replicas, groups, tokens and heads; zeros and idle ranks."""
    workload = problem.workload
    ranks = list(range(problem.cluster.world_size))
    rng.shuffle(ranks)
    used = ranks[: rng.randint(1, len(ranks))] if rng.random() < 0.2 else ranks
    accumulation = rng.choice(workload.accumulations)
    sequences = workload.global_batch // accumulation
    count = rng.randint(1, min(3, sequences, len(used)))
    replicas = [
        Replica(_groups(rng, problem, members, share * workload.seq_len), share)
        for members, share in zip(
            _runs(rng, used, count), _parts(rng, sequences, count, least=1), strict=True
        )
    ]
    return Layout("drawn", tuple(replicas), accumulation)


def _groups(rng: Random, problem: Problem, ranks: list[int], total: int) -> tuple[Group, ...]:
    members = _runs(rng, ranks, rng.randint(1, len(ranks)))
    tokens = iter(_parts(rng, total, len(ranks)))
    return tuple(
        Group(
            tuple(group),
            tuple(next(tokens) for _ in group),
            tuple(_parts(rng, problem.model.heads, len(group))),
        )
        for group in members
    )


def _runs(rng: Random, ranks: list[int], count: int) -> list[list[int]]:
    """Cut ranks into `count` runs that are not empty."""
    sizes = _parts(rng, len(ranks), count, least=1)
    stops = list(accumulate(sizes))
    return [ranks[stop - size : stop] for stop, size in zip(stops, sizes, strict=True)]


def _parts(rng: Random, total: int, count: int, least: int = 0) -> list[int]:
    """Return `count` numbers from `least` that add up to `total`."""
    spare = total - least * count
    cuts = sorted(rng.randint(0, spare) for _ in range(count - 1))
    return [least + b - a for a, b in zip([0, *cuts], [*cuts, spare], strict=True)]
