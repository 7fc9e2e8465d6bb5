"""Random clusters, problems and layouts for the planner's tests, from one seeded generator."""

from __future__ import annotations

from pathlib import Path
from random import Random

from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.plans import ExchangePlan
from hexiseq_triton.planner.problem import Group, Layout, Problem
from hexiseq_triton.planner.workload import Workload

EXAMPLES = Path(__file__).parents[1] / "examples" / "clusters"


def problem_for(
    cluster: Cluster, model: ModelSpec | str, exchange: ExchangePlan | None = None, **workload: int
) -> Problem:
    """Return a problem; `model` may be a preset's name."""
    model = ModelSpec.load(model) if isinstance(model, str) else model
    return Problem(cluster, model, Workload(**workload), exchange or ExchangePlan())


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
        causal=rng.random() < 0.8,
    )


def drawn_layout(rng: Random, problem: Problem) -> Layout:
    """Return any balanced layout: any groups, any tokens, any heads, zeros included."""
    ranks = list(range(problem.cluster.world_size))
    rng.shuffle(ranks)
    count = rng.randint(1, len(ranks))
    cuts = sorted(rng.sample(range(1, len(ranks)), count - 1))
    members = [ranks[a:b] for a, b in zip([0, *cuts], [*cuts, len(ranks)], strict=True)]
    tokens = iter(_parts(rng, problem.workload.stream_tokens, len(ranks)))
    groups = [
        Group(
            tuple(group),
            tuple(next(tokens) for _ in group),
            tuple(_parts(rng, problem.model.heads, len(group))),
        )
        for group in members
    ]
    return Layout("drawn", tuple(groups))


def _parts(rng: Random, total: int, count: int) -> list[int]:
    """Return `count` numbers from 0 that add up to `total`."""
    cuts = sorted(rng.randint(0, total) for _ in range(count - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
