"""Baselines are tuned over all they may choose: grids, islands, equal splits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from random import Random

import pytest
from drawn_problems import drawn_cluster, problem_for
from invented import SHAPE, cluster_of_nodes, mixed

from hexiseq_triton.planner.cost import evaluate
from hexiseq_triton.planner.equal import equal_splits
from hexiseq_triton.planner.grid_bounds import least_seconds
from hexiseq_triton.planner.grids import Grid, estimated_seconds, orders, shapes
from hexiseq_triton.planner.layouts import BASELINES, price
from hexiseq_triton.planner.partition import apportion
from hexiseq_triton.planner.problem import Group, Layout, Problem, Replica


def _all_grids(problem: Problem, **fixed: object) -> Iterator[Grid]:
    ranks = tuple(range(problem.cluster.world_size))
    for shape in shapes(problem, len(ranks), problem.model.heads):
        for context_first in (False, True):
            for order in orders(problem, ranks).values():
                yield Grid(replace(shape, context_first=context_first, **fixed), order)  # type: ignore[arg-type]


def drawn_mixed(seed: int) -> Problem:
    """Return a problem whose links are slow, fair or fast."""
    gb_per_s = [0.02, 0.5, 10.0][seed % 3]
    return mixed(seq_len=[1 << 12, 1 << 16][seed % 2], network_gb_per_s=gb_per_s)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["usp", "proportional", "loongtrain"])
def test_no_grid_is_faster_than_the_tuned_one(name: str, seed: int) -> None:
    problem = drawn_mixed(seed)
    fixed = {
        "usp": {},
        "proportional": {"proportional": True},
        "loongtrain": {"exchange": "double_ring"},
    }[name]
    found = [price(problem, each) for each in BASELINES if each.startswith(name)]

    costs = [evaluate(problem, grid.layout(problem)) for grid in _all_grids(problem, **fixed)]
    fastest = min(cost.step_seconds for cost in costs if cost.fits)
    best = min(each.cost.step_seconds for each in found if each.cost)
    assert best == pytest.approx(fastest, rel=1e-6)  # estimates have unrounded tokens


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "fixed",
    [
        {},
        {"proportional": True},
        {"arrangement": "contiguous"},
        {"exchange": "rotation"},
        {"exchange": "double_ring"},
        {"exchange": "all_gather"},
    ],
    ids=str,
)
def test_estimates_are_the_evaluators_and_bounds_are_below(
    fixed: dict[str, object], seed: int
) -> None:
    problem = drawn_mixed(seed)
    grids = list(_all_grids(problem, **fixed))
    if fixed.get("exchange") == "all_gather":
        grids = [grid for grid in grids if grid.shape.hp == 1]
    estimates = estimated_seconds(problem, grids).tolist()
    costs = [evaluate(problem, grid.layout(problem)).step_seconds for grid in grids]

    assert estimates == pytest.approx(costs, rel=1e-3)
    for grid, cost in zip(grids, costs, strict=True):
        least = least_seconds(problem, [grid.shape], grid.ranks)[0]
        assert least <= cost * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_islands_are_near_the_best_of_all_islands(seed: int) -> None:
    cluster = cluster_of_nodes(
        ["card", "card", "half", "half"], network_gb_per_s=[0.1, 1, 10, 100][seed]
    )
    problem = problem_for(cluster, SHAPE, seq_len=1 << 14, global_batch=3)
    found = price(problem, "islands").cost
    assert found is not None

    costs = [evaluate(problem, layout) for layout in _all_islands(problem)]
    assert found.step_seconds <= 1.05 * min(cost.step_seconds for cost in costs if cost.fits)


def _all_islands(problem: Problem) -> Iterator[Layout]:
    """Yield every way to train 3 sequences on cards 0 and 1, and half cards 2 and 3."""
    halves = [[((0,), 1), ((1,), 1)], [((0, 1), 1)], [((0, 1), 2)]]
    for first, second in product(halves, halves):
        pools = first + [(tuple(rank + 2 for rank in ranks), hp) for ranks, hp in second]
        for passes, sequences in ((1, 3), (3, 1)):
            for counts in product(range(sequences + 1), repeat=len(pools)):
                if sum(counts) == sequences:
                    chosen = zip(pools, counts, strict=True)
                    yield Layout(
                        "",
                        tuple(_island(problem, *pool, count) for pool, count in chosen if count),
                        passes,
                    )


def _island(problem: Problem, ranks: tuple[int, ...], hp: int, count: int) -> Replica:
    tokens = apportion(count * problem.workload.seq_len, [1] * len(ranks))
    groups = (
        Group(ranks[at : at + hp], tuple(tokens[at : at + hp]), (8 // hp,) * hp)
        for at in range(0, len(ranks), hp)
    )
    return Replica(tuple(groups), count)


@pytest.mark.parametrize("seed", range(5))
def test_equal_splits_hold_every_rank_once_where_nothing_divides(seed: int) -> None:
    cluster = drawn_cluster(Random(seed))
    problem = problem_for(cluster, replace(SHAPE, heads=7, kv_heads=7), seq_len=1001)

    for layout in equal_splits(problem):
        ranks = [rank for group in layout.groups for rank in group.ranks]
        assert sorted(ranks) == list(range(cluster.world_size))
    assert price(problem, "equal_split").cost is not None
