"""The gap's parts: they add up to the gap, and each is where it should be."""

from __future__ import annotations

from random import Random

import pytest
from drawn_problems import EXAMPLES, drawn_layout, drawn_problem, problem_for

from hexiseq_triton.planner import plan
from hexiseq_triton.planner.bound import lower_bound
from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.cost import Cost, evaluate
from hexiseq_triton.planner.gap import gap_parts
from hexiseq_triton.planner.problem import Group, Layout, Problem, Replica

NAMES = {"grouping", "rounding", "start-up", "communication"}


def parts_of(problem: Problem, *groups: Group) -> dict[str, float]:
    """Return the gap's parts of one replica in one pass."""
    cost = evaluate(problem, Layout("", (Replica(groups),), 1))
    return _parts(cost)


def _parts(cost: Cost) -> dict[str, float]:
    bound = lower_bound(cost.problem)
    assert bound is not None
    parts = gap_parts(cost, bound)
    assert sum(parts.values()) == pytest.approx(cost.step_seconds / bound.seconds - 1)
    return parts


@pytest.mark.parametrize("seed", range(20))
def test_parts_add_up_for_any_layout(seed: int) -> None:
    rng = Random(seed)
    problem = drawn_problem(rng)

    assert set(_parts(evaluate(problem, drawn_layout(rng, problem)))) == NAMES


def alike(count: int = 4, **link: float) -> Problem:
    """Return alike GPUs in one node; their links take no time unless told otherwise."""
    card = {"dense_tflops": 100, "memory_gb": 80, "network_gb_per_s": link.get("gb_per_s", 1e7)}
    latency = link.get("latency_us", 1e-6)
    node = {"name": "a", "gpus": {"card": count}, "intra_latency_us": latency}
    cluster = Cluster.from_mapping({"nodes": [node], "gpus": {"card": card}})
    return problem_for(cluster, "3b", seq_len=65536, global_batch=1, causal=False)


def even(ranks: range) -> Group:
    count = len(ranks)
    return Group(tuple(ranks), (65536 // count,) * count, (32 // count,) * count)


def test_even_shares_over_fast_links_leave_no_gap() -> None:
    parts = parts_of(alike(), even(range(4)))

    assert all(abs(part) < 1e-4 for part in parts.values())


def test_idle_gpus_are_grouping() -> None:
    parts = parts_of(alike(), even(range(2)))

    assert parts["grouping"] == pytest.approx(1, rel=1e-2)
    assert all(abs(part) < 1e-3 for name, part in parts.items() if name != "grouping")


def test_uneven_heads_are_rounding() -> None:
    parts = parts_of(alike(), Group((0, 1, 2, 3), (16384,) * 4, (10, 8, 7, 7)))

    assert parts["rounding"] > 0.15
    assert all(abs(part) < 1e-3 for name, part in parts.items() if name != "rounding")


def test_bytes_of_slow_links_are_communication_and_their_latency_is_start_up() -> None:
    bytes_only = parts_of(alike(gb_per_s=20), even(range(4)))
    latency_only = parts_of(alike(latency_us=1e5), even(range(4)))

    assert bytes_only["communication"] > 10 * max(bytes_only["start-up"], bytes_only["rounding"])
    assert latency_only["start-up"] > 0.1
    assert abs(latency_only["communication"]) < 1e-3


def test_a_plan_file_holds_the_parts() -> None:
    found = plan(EXAMPLES / "2-fast-2-slow.yaml", "tiny", seq_len=4096)

    assert set(found.gap_parts) == NAMES
    assert sum(found.gap_parts.values()) == pytest.approx(found.gap)
