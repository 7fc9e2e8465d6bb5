"""Planning problems small enough to look at every layout, and cards with little memory."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.gpus import Figure
from hexiseq_triton.planner.memory import FIXED, memory_model
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.plans import ExchangePlan
from hexiseq_triton.planner.problem import Problem
from hexiseq_triton.planner.rates import MEMORY_LIMIT_SHARE
from hexiseq_triton.planner.workload import Workload


def tiny_problem(rng: Random) -> Problem:
    """Return two to four GPUs of up to three models, few tokens and heads; hard in every way.

    A third each is short of memory, has slow links, or neither.
    """
    kv_heads = rng.choice([1, 2])
    model = ModelSpec(
        layers=2,
        hidden=2,
        heads=kv_heads * rng.choice([1, 2, 3]),
        kv_heads=kv_heads,
        head_dim=8192,
        ffn=8,
        vocab=16,
    )
    world = rng.choice([2, 3, 3, 4])
    kind = rng.choice(["memory", "links", "neither"])
    cards = {
        name: {
            "dense_tflops": rng.uniform(1e-4, 1e-3),
            "memory_gb": 4.0,
            "network_gb_per_s": 10 ** rng.uniform(*((-3, -1.5) if kind == "links" else (-1.5, 0))),
            "efficiency": {"attention_forward": rng.uniform(0.2, 0.7)},
        }
        for name in ("one", "two", "three")
    }
    names = rng.choices(sorted(cards), k=world)
    at = rng.randint(1, world)
    nodes = [{"name": f"n{i}", "gpus": part} for i, part in enumerate((names[:at], names[at:]))]
    cluster = Cluster.from_mapping(
        {"nodes": [node for node in nodes if node["gpus"]], "gpus": cards}
    )
    workload = Workload(
        seq_len={2: 12, 3: 8, 4: 6}[world],
        global_batch=rng.choice([1, 1, 2]),
        causal=rng.random() < 0.8,
    )
    problem = Problem(cluster, model, workload, ExchangePlan())
    return with_little_memory(rng, problem) if kind == "memory" else problem


def with_little_memory(rng: Random, problem: Problem) -> Problem:
    """Return the problem on cards that together hold up to 4 times the tokens of one sequence."""
    memory, model = memory_model(problem), problem.model
    tokens = problem.workload.seq_len * rng.uniform(1, 4) / problem.cluster.world_size
    num_bytes = (memory.moments[:, FIXED] + tokens * memory.whole_tokens(model)).max()
    num_bytes += 2 * memory.communicator + model.kv_heads * memory.buffer_per_kv_head
    figure = Figure(num_bytes / MEMORY_LIMIT_SHARE / 1e9)
    gpus = {name: replace(gpu, memory_gb=figure) for name, gpu in problem.cluster.gpus.items()}
    return replace(problem, cluster=replace(problem.cluster, gpus=gpus))
