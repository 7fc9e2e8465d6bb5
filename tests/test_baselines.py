"""Baselines: each is what its name says, tuned over all it may choose, and priced fairly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from random import Random

import pytest
from drawn_problems import drawn_cluster, problem_for
from invented import CARD, MODEL, cluster_of, cluster_of_nodes

from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.cost import Cost, evaluate
from hexiseq_triton.planner.equal import equal_splits
from hexiseq_triton.planner.grid_bounds import least_seconds
from hexiseq_triton.planner.grids import Grid, Shape, estimated_seconds, orders, shapes
from hexiseq_triton.planner.layouts import BASELINES, Priced, price, prices
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.partition import apportion
from hexiseq_triton.planner.problem import Group, Layout, Problem, Replica
from hexiseq_triton.planner.rates import together

SHAPE = ModelSpec(layers=2, hidden=512, heads=8, kv_heads=4, ffn=1024, vocab=1000)
NOT_HERE = {
    "loongtrain_head_first",
    "loongtrain_context_first",
    "megatron_p2p",
    "megatron_all_gather",
    "megatron_a2a_p2p",
}


def mixed(seq_len: int = 1 << 15, network_gb_per_s: float = 2.0, **workload: int) -> Problem:
    """Return two nodes of two whole and two half cards each, and a batch of 4."""
    cluster = cluster_of_nodes(
        ["card", "card", "half", "half"],
        count=2,
        intra_gb_per_s=20.0,
        network_gb_per_s=network_gb_per_s,
    )
    return problem_for(cluster, SHAPE, seq_len=seq_len, **({"global_batch": 4} | workload))


@pytest.fixture(scope="module")
def priced() -> dict[str, Priced]:
    return prices(mixed())


def layout_of(priced: Priced) -> Layout:
    assert priced.cost is not None, priced.reason
    return priced.cost.layout


def test_all_have_a_price_that_fits_and_those_the_runtime_lacks_say_so(
    priced: dict[str, Priced],
) -> None:
    assert set(priced) == set(BASELINES)
    for name, found in priced.items():
        assert found.cost is not None
        assert found.cost.fits
        assert found.reason == found.cost.layout.name
        assert found.executable == (name not in NOT_HERE)


def test_all_train_the_same_batch(priced: dict[str, Priced]) -> None:
    for found in priced.values():
        layout = layout_of(found)
        sequences = sum(replica.sequences for replica in layout.replicas)
        assert layout.accumulation * sequences == 4
        for replica in layout.replicas:
            assert replica.num_tokens == replica.sequences << 15
        ranks = [rank for group in layout.groups for rank in group.ranks]
        assert len(ranks) == len(set(ranks))


@pytest.mark.parametrize("name", [name for name in BASELINES if name != "proportional"])
def test_all_but_proportional_split_tokens_and_heads_equally(
    name: str, priced: dict[str, Priced]
) -> None:
    for replica in layout_of(priced[name]).replicas:
        tokens = [count for group in replica.groups for count in group.tokens]
        assert max(tokens) - min(tokens) <= 1
        for group in replica.groups:
            assert max(group.heads) - min(group.heads) <= 1
            assert sum(group.heads) == 8


def test_groups_are_what_the_names_say(priced: dict[str, Priced]) -> None:
    def sizes(name: str) -> list[list[int]]:
        replicas = layout_of(priced[name]).replicas
        return [[len(group.ranks) for group in replica.groups] for replica in replicas]

    for name in ("ring", "zigzag_ring", "megatron_p2p", "megatron_all_gather"):
        assert {size for replica in sizes(name) for size in replica} == {1}
    for name in ("ulysses", "megatron_a2a"):
        assert {len(replica) for replica in sizes(name)} == {1}
    for replica in sizes("megatron_a2a_p2p"):
        assert len(replica) > 1
        assert set(replica) in ({2}, {4})  # divisors of the KV heads
    assert layout_of(priced["ring"]).arrangement == "contiguous"
    assert layout_of(priced["zigzag_ring"]).arrangement == "balanced"
    exchanges = {name: layout_of(priced[name]).exchange for name in sorted(NOT_HERE)}
    assert exchanges == {
        "loongtrain_head_first": "double_ring",
        "loongtrain_context_first": "double_ring",
        "megatron_p2p": "rotation",
        "megatron_all_gather": "all_gather",
        "megatron_a2a_p2p": "rotation",
    }


def test_fastest_only_leaves_the_slow_ones_idle(priced: dict[str, Priced]) -> None:
    ranks = {rank for group in layout_of(priced["fastest_only"]).groups for rank in group.ranks}
    assert ranks == {0, 1, 4, 5}


def test_proportional_gives_tokens_by_speed_and_equal_heads(priced: dict[str, Priced]) -> None:
    layout = layout_of(priced["proportional"])
    speed = {rank: 2 if rank in (0, 1, 4, 5) else 1 for rank in range(8)}
    for replica in layout.replicas:
        whole = sum(speed[rank] for group in replica.groups for rank in group.ranks)
        for group in replica.groups:
            assert len(set(group.heads)) == 1
            for rank, tokens in zip(group.ranks, group.tokens, strict=True):
                assert abs(tokens - replica.num_tokens * speed[rank] / whole) < 1


def test_islands_mix_no_models_and_slow_ones_take_fewer_sequences() -> None:
    problem = mixed(global_batch=6)
    layout = layout_of(price(problem, "islands"))

    taken = {"card": 0, "half": 0}
    for replica in layout.replicas:
        ranks = [rank for group in replica.groups for rank in group.ranks]
        (model,) = {problem.cluster.devices[rank].gpu for rank in ranks}
        taken[model] += replica.sequences * layout.accumulation
    assert taken == {"card": 4, "half": 2}


# -------------------------------------------------------------------- tuned


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


def test_prices_are_the_same_together_and_alone(priced: dict[str, Priced]) -> None:
    for name in ("usp", "ulysses", "islands", "megatron_p2p"):
        alone = price(mixed(), name).cost
        assert alone is not None
        together = priced[name].cost
        assert together is not None
        assert alone.step_seconds == together.step_seconds


# -------------------------------------------------------------------- exchanges the runtime lacks


def _ring_cost(exchange: str, nodes: int, each: int, gb_per_s: float) -> tuple[Problem, Cost]:
    """Return the cost of one sequence of 8,000 tokens over equal ranks, in groups of one."""
    cluster = cluster_of_nodes(
        ["card"] * each, count=nodes, intra_gb_per_s=100 * gb_per_s, network_gb_per_s=gb_per_s
    )
    problem = problem_for(cluster, MODEL, seq_len=8000, global_batch=1)
    count = nodes * each
    shape = Shape(1, 1, count, 1, exchange=exchange)  # type: ignore[arg-type]
    return problem, evaluate(problem, Grid(shape, tuple(range(count))).layout(problem))


@pytest.mark.parametrize("gb_per_s", [1e-3, 0.05, 10.0])
def test_a_rotating_ring_takes_its_slowest_hop_or_rank_each_step(gb_per_s: float) -> None:
    _, cost = _ring_cost("rotation", nodes=2, each=2, gb_per_s=gb_per_s)

    block = 2000 * 2 * 2 * 2 * 16 / (0.8e9 * gb_per_s)  # k and v of two heads, across nodes
    for layer, share in ((cost.forward, 1), (cost.backward, 3)):
        step = layer.attention[0] / 4
        expected = 3 * max(together(step, share * block)) + step
        expected += 2 * block if share == 3 else 0.0  # gradients go home
        assert layer.exchanged.tolist() == pytest.approx([expected] * 4, rel=1e-6)


def test_two_nested_rings_hide_the_slow_hop_behind_a_window() -> None:
    _, one = _ring_cost("rotation", nodes=2, each=4, gb_per_s=0.25)
    _, two = _ring_cost("double_ring", nodes=2, each=4, gb_per_s=0.25)

    block = 1000 * 2 * 2 * 2 * 16 / (0.8e9 * 0.25)
    step = two.forward.attention[0] / 8
    assert step < block < 4 * step
    inner = 3 * max(together(step, 0.8 / 75 * block)) + step
    expected = max(together(inner, block)) + inner
    assert two.forward.exchanged[0] == pytest.approx(expected, rel=1e-6)
    assert two.forward.exchanged[0] < 0.8 * one.forward.exchanged[0]


def test_gathered_keys_are_waited_for() -> None:
    _, cost = _ring_cost("all_gather", nodes=2, each=2, gb_per_s=1e-3)

    # two NICs take in the other node's 4,000 tokens
    gather = 4000 / 2 * 2 * 2 * 2 * 16 / 0.8e6
    waited = cost.forward.exchanged - cost.forward.attention
    assert waited.tolist() == pytest.approx([gather] * 4, rel=1e-6)
    waited = cost.backward.exchanged - cost.backward.attention
    assert waited.tolist() == pytest.approx([3 * gather] * 4, rel=1e-6)


# -------------------------------------------------------------------- what forbids a baseline


def test_heads_that_do_not_divide_are_named() -> None:
    problem = problem_for(cluster_of(5), SHAPE, seq_len=1000)

    ulysses = price(problem, "ulysses")
    assert ulysses.cost is None
    assert ulysses.reason.startswith("8 query heads do not divide by 5 ranks")
    assert price(problem, "megatron_a2a").reason.startswith("4 KV heads do not divide by 5 ranks")
    assert "make several groups" in price(problem, "megatron_a2a_p2p").reason


def test_one_model_has_no_slower_one_to_leave_out() -> None:
    problem = problem_for(cluster_of(2), SHAPE, seq_len=1000)
    assert "all GPUs are of one model" in price(problem, "fastest_only").reason


def test_out_of_memory_names_the_rank_and_its_bytes() -> None:
    cards = {"card": CARD | {"memory_gb": 2}}
    node = {"name": "a", "gpus": ["card", "card"]}
    cluster = Cluster.from_mapping({"nodes": [node], "gpus": cards})
    problem = problem_for(cluster, SHAPE, seq_len=1 << 22, global_batch=1)

    for name in ("ring", "usp", "loongtrain_head_first", "equal_split", "proportional"):
        found = price(problem, name)
        assert found.cost is None
        assert found.reason.startswith("out of memory: rank ")
        assert "(card of node a) needs" in found.reason
        assert found.reason.endswith("and may use 1.9 GB")
    assert price(problem, "islands").reason.startswith("out of memory")
