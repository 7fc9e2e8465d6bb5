"""Tokens and heads inside fixed groups: against the evaluator, closed forms, and brute force."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from random import Random

import brute_force
import numpy as np
import pytest
from drawn_problems import drawn_problem, problem_for
from tiny_problems import tiny_problem, with_little_memory

from hexiseq_triton.planner.balance import Dealing, balanced
from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.cost import Cost, evaluate
from hexiseq_triton.planner.group_time import directions, kv_heads_held
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.moves import improved
from hexiseq_triton.planner.problem import Group, Layout, Problem, Replica
from hexiseq_triton.planner.stages import Frame, Ranks, Splitter

DRAWS = range(80)
_EVALUATIONS = 1000


@pytest.mark.parametrize("seed", range(30))
def test_a_group_alone_costs_what_the_evaluator_says(seed: int) -> None:
    rng = Random(seed)
    problem = drawn_problem(rng)
    splitter = Splitter(problem)
    ranks = tuple(rng.sample(range(problem.cluster.world_size), k=problem.cluster.world_size))
    group, seconds = splitter.split(ranks, problem.workload.seq_len, alone=True)

    cost = evaluate(problem, Layout("", (Replica((group,)),), problem.workload.global_batch))
    tokens, heads = np.array(group.tokens), np.array(group.heads)
    held = kv_heads_held(heads, problem.model.heads // problem.model.kv_heads)
    both = directions(tokens, heads, held, splitter.members(ranks, alone=True))
    assert both == pytest.approx([float(d[0]) for d in cost.directions], rel=1e-12)
    assert seconds == pytest.approx(float(cost.group_seconds[0]), rel=1e-12)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("recompute", ["full", "none"])
def test_equal_ranks_of_one_node_by_hand(count: int, causal: bool, recompute: str) -> None:
    """Everything is even; each all-to-all moves what one rank sends to the others."""
    card = {"dense_tflops": 100, "memory_gb": 80, "network_gb_per_s": 10, "nvlink_gb_per_s": 40}
    node = {"name": "a", "gpus": ["card"] * count}
    cluster = Cluster.from_mapping({"nodes": [node], "gpus": {"card": card}})
    model = ModelSpec(layers=1, hidden=768, heads=12, head_dim=64, ffn=3072, vocab=128)
    problem = problem_for(cluster, model, seq_len=12288)
    workload = replace(problem.workload, causal=causal, recompute=recompute)
    splitter = Splitter(replace(problem, workload=workload))
    group, seconds = splitter.split(tuple(range(count)), 12288, alone=True)

    assert set(group.tokens) == {12288 // count}
    assert set(group.heads) == {12 // count}
    tokens, heads = 12288 // count, 12 // count
    pairs = 12288 * (12289 / 2 if causal else 12288) * heads
    parameters = 4 * 768 * 768 + 3 * 768 * 3072
    sent = tokens * 64 * (12 - heads)
    forward = 2 * parameters * tokens / 70e12 + 4 * 64 * pairs / 50e12
    backward = 4 * parameters * tokens / 70e12 + 10 * 64 * pairs / 40e12
    if count > 1:  # q, k, v in half precision, then o; dO with one float32 a row, then dq, dk, dv
        forward += 2 * sent * (3 + 1) / 30e9 + 2 * 5e-6
        backward += sent * (2 + 4 / 64) / 30e9 + sent * (2 + 8) / 30e9 + 3 * 5e-6
    times = 2 if recompute == "full" else 1
    assert seconds == pytest.approx(times * forward + backward, rel=1e-12)


@pytest.mark.parametrize("draw", DRAWS)
def test_a_fixed_grouping_equals_brute_force_over_all_tokens_and_heads(draw: int) -> None:
    """`bench/planner_experiments.py` looks at 200."""
    held_against_brute_force(draw)


def held_against_brute_force(draw: int) -> Counter[str]:
    """Fail if a fixed grouping's split is not the best; return what kind of problem it was.

    Every second one is short of memory; a third of the others is bound by its links.
    """
    rng = Random(draw)
    problem = tiny_problem(rng)
    problem = replace(problem, workload=replace(problem.workload, global_batch=1))
    if draw % 2:
        problem = with_little_memory(rng, problem)
    grouping = drawn_grouping(rng, problem.cluster.world_size)

    splitter = Splitter(problem)
    found = balanced(splitter, Frame("", 1), Dealing("", grouping, 1, 6, in_order=True))
    found = improved(splitter, found, _EVALUATIONS, fixed=True)

    assert tuple(group.ranks for group in found.layout.groups) == grouping
    best = best_split(problem, grouping)
    if best is None:
        assert not found.fits
    else:
        assert found.fits
        assert found.step_seconds == pytest.approx(best.step_seconds, rel=1e-9)
    moving = found.step_seconds > 2 * found.busy_seconds.max()
    return Counter(
        {
            "problems": 1,
            "short of memory": draw % 2,
            "communication-bound": int(moving),
            "nothing fits": int(best is None),
        }
    )


def drawn_grouping(rng: Random, world: int) -> tuple[Ranks, ...]:
    """Return one to three groups of all ranks, in any order."""
    ranks = rng.sample(range(world), k=world)
    count = min(world, rng.choice([1, 1, 2, 2, 3]))
    cuts = sorted(rng.sample(range(1, world), count - 1))
    return tuple(tuple(ranks[a:b]) for a, b in zip([0, *cuts], [*cuts, world], strict=True))


def best_split(problem: Problem, grouping: tuple[Ranks, ...]) -> Cost | None:
    """Return the fastest split that fits, of all there are; None if none fits."""
    structure = brute_force.Structure((grouping,), (1,), 1, "balanced")
    choices = brute_force.choices(problem, structure, unit=1)
    least = brute_force.least_seconds(problem, choices)
    best, seconds = None, math.inf
    for index in np.argsort(least, kind="stable").tolist():
        if least[index] >= seconds:
            break
        shares = zip(choices.tokens[index].tolist(), choices.heads[index].tolist(), strict=True)
        groups = tuple(Group(r, *zip(*[next(shares) for _ in r], strict=True)) for r in grouping)
        cost = evaluate(problem, Layout("", (Replica(groups),), 1))
        if cost.fits and cost.step_seconds < seconds:
            best, seconds = cost, cost.step_seconds
    return best
