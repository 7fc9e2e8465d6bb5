"""Baselines: each is what its name says, is priced fairly, or says what forbids it."""

from __future__ import annotations

import pytest
from drawn_problems import problem_for
from invented import CARD, MODEL, SHAPE, cluster_of, cluster_of_nodes, mixed

from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.cost import Cost, evaluate
from hexiseq_triton.planner.grids import Grid, Shape
from hexiseq_triton.planner.layouts import BASELINES, Priced, price, prices
from hexiseq_triton.planner.problem import Layout, Problem
from hexiseq_triton.planner.rates import together

NOT_HERE = {
    "loongtrain_head_first",
    "loongtrain_context_first",
    "megatron_p2p",
    "megatron_all_gather",
    "megatron_a2a_p2p",
}


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
