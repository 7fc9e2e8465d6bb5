"""The lower bound against every kind of layout the evaluator can judge."""

from __future__ import annotations

import inspect
from random import Random

import pytest
from drawn_problems import drawn_layout, drawn_problem, problem_for

from hexiseq_triton.planner import bound
from hexiseq_triton.planner.bound import lower_bound_seconds
from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.cost import evaluate
from hexiseq_triton.planner.layouts import BASELINES, price
from hexiseq_triton.planner.search import best_asymmetric


@pytest.mark.parametrize("seed", range(10))
def test_no_drawn_layout_beats_the_bound(seed: int) -> None:
    rng = Random(seed)
    for _ in range(100):
        problem = drawn_problem(rng)
        cost = evaluate(problem, drawn_layout(rng, problem))

        assert lower_bound_seconds(problem) <= cost.step_seconds * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_no_searched_or_balanced_baseline_layout_beats_the_bound(seed: int) -> None:
    problem = drawn_problem(Random(seed))
    costs = [price(problem, name).cost for name in BASELINES if name != "ring"]
    costs.append(best_asymmetric(problem))

    least = lower_bound_seconds(problem)
    assert all(least <= cost.step_seconds * (1 + 1e-12) for cost in costs if cost)


def test_one_gpu_meets_its_bound() -> None:
    cluster = Cluster.from_mapping({"nodes": [{"name": "a", "gpus": ["H100-SXM"]}]})
    problem = problem_for(cluster, "3b", seq_len=8192)

    layout_cost = price(problem, "ulysses").cost
    assert layout_cost is not None
    assert layout_cost.step_seconds == pytest.approx(lower_bound_seconds(problem), rel=1e-12)


def test_bound_knows_nothing_of_the_search() -> None:
    source = inspect.getsource(bound)

    for module in ("search", "groupings", "layouts", "split"):
        assert f"planner.{module}" not in source
