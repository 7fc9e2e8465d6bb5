"""The order of transfers: nothing missing, nothing twice, and nobody waits for long."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import pytest
from drawn_plans import Case, cases
from exchange_model import finish_time
from hypothesis import given

from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.planner import ExchangePlan, Plan, Split
from hexiseq_triton.planner.heads import HeadRange
from hexiseq_triton.planner.plans import Order
from hexiseq_triton.planner.schedule import (
    Transfer,
    atomic_intervals,
    intervals_of,
    radical_inverse,
    transfers,
)
from hexiseq_triton.rounds import Round
from hexiseq_triton.segments import CAUSAL, FULL, Mask, visible_rows


def scheduled(case: Case) -> tuple[BatchLayout, Mask, list[list[Transfer]]]:
    layout = BatchLayout(case.plan, case.plan.shares[0].rank, case.lengths[0])
    mask = CAUSAL if case.options["causal"] else FULL
    exchange = case.plan.exchange
    return layout, mask, transfers(case.plan.replicas[0], layout.group_segments, mask, exchange)


@given(cases())
def test_each_rank_gets_each_visible_row_of_its_heads_once(case: Case) -> None:
    layout, mask, rounds = scheduled(case)
    replica = case.plan.replicas[0]
    intervals = atomic_intervals(replica)
    got = Counter(
        (item.receiver, item.group, item.kv_heads, row)
        for item in chain(*rounds)
        for start, stop in item.rows
        for row in range(start, stop)
    )
    expected = set()
    for g, group in enumerate(replica.groups):
        for source in range(len(replica.groups)):
            if source == g:
                continue
            rows = visible_rows(layout.group_segments[g], layout.group_segments[source], mask)
            for share in group.ranks:
                for interval in intervals_of(share, intervals):
                    expected |= {
                        (share.rank, source, interval, row) for a, b in rows for row in range(a, b)
                    }
    assert set(got) == expected
    assert set(got.values()) <= {1}


@given(cases())
def test_the_sender_holds_the_heads_and_chunks_are_bounded(case: Case) -> None:
    _, _, rounds = scheduled(case)
    held = {share.rank: share.kv_heads for share in case.plan.shares}
    for item in chain(*rounds):
        assert held[item.sender][0] <= item.kv_heads[0] < item.kv_heads[1] <= held[item.sender][1]
        assert held[item.receiver][0] <= item.kv_heads[0]
        assert item.kv_heads[1] <= held[item.receiver][1]
        assert 0 < item.num_rows <= case.plan.exchange.chunk_tokens
        assert item.sender != item.receiver


@given(cases())
def test_a_round_brings_a_rank_no_more_than_its_window_and_a_chunk(case: Case) -> None:
    _, _, rounds = scheduled(case)
    exchange = case.plan.exchange
    rows: Counter[tuple[int, HeadRange, int]] = Counter()
    for number, together in enumerate(rounds):
        for item in together:
            rows[item.receiver, item.kv_heads, number] += item.num_rows
    assert max(rows.values(), default=0) <= (exchange.window + 1) * exchange.chunk_tokens


@given(cases())
def test_both_ends_see_the_same_rounds(case: Case) -> None:
    mask = CAUSAL if case.options["causal"] else FULL
    left, came = [], []
    counts = set()
    for share in case.plan.replicas[0].shares:
        rounds = BatchLayout(case.plan, share.rank, case.lengths[0]).rounds(mask)
        counts.add(len(rounds))
        for r, step in enumerate(rounds):
            left += [(r, share.rank, item.receiver, i, item) for i, item in _enumerated(step, 0)]
            came += [(r, item.sender, share.rank, i, item) for i, item in _enumerated(step, 1)]
            for item, segments in step.arrivals:
                assert sum(s.num_tokens for s in segments) == item.num_rows
    assert sorted(left) == sorted(came)
    assert len(counts) == 1


def _enumerated(step: Round, end: int) -> list[tuple[int, Transfer]]:
    """Return departures (0) or arrivals (1), counted for each rank at the other end."""
    items = [arrival.item for arrival in step.arrivals] if end else list(step.departures)
    seen: Counter[int] = Counter()
    found = []
    for item in items:
        other = item.sender if end else item.receiver
        found.append((seen[other], item))
        seen[other] += 1
    return found


def test_equal_groups_need_no_more_rounds_than_a_ring() -> None:
    exchange = ExchangePlan(chunk_tokens=64, window=1)
    plan = Plan.from_splits([Split((64,), (4,)) for _ in range(8)], exchange=exchange)
    layout = BatchLayout(plan, 0, [512])
    assert len(layout.rounds(FULL)) == 7


def groups_of_one(*sizes: int, order: Order) -> Plan:
    return Plan.from_splits(
        [Split((16384 * size,), (8,)) for size in sizes],
        num_kv_heads=8,
        exchange=ExchangePlan(chunk_tokens=4096, window=2, order=order),
    )


@pytest.mark.parametrize("order", ["ring", "spread"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("large", [3, 8])
@pytest.mark.parametrize("sizes", ["large, small twice", "large ones first", "one large of eight"])
def test_uneven_groups_wait_little_for_keys(
    sizes: str, large: int, backward: bool, order: Order
) -> None:
    groups = {
        "large, small twice": (large, 1, large, 1),
        "large ones first": (large, large, 1, 1),
        "one large of eight": (1, 1, 1, 1, 1, 1, 1, large),
    }[sizes]
    plan = groups_of_one(*groups, order=order)
    assert finish_time(plan, busiest_port=0.4, backward=backward) <= 1.02


@pytest.mark.parametrize("sizes", [(3, 1, 3, 1), (8, 1, 8, 1), (8, 8, 1, 1)])
def test_spread_keeps_busy_ports_busy(sizes: tuple[int, ...]) -> None:
    ring, spread = (
        finish_time(groups_of_one(*sizes, order=order), busiest_port=0.8, backward=True)
        for order in ("ring", "spread")
    )
    assert spread <= 1.10
    assert spread < ring


def test_spread_brings_some_of_every_group_in_each_round() -> None:
    plan = groups_of_one(3, 1, 2, 2, order="spread")
    layout = BatchLayout(plan, 1, [plan.seq_len])
    for step in layout.rounds(FULL)[:-1]:
        rows = Counter({arrival.item.group: 0 for arrival in step.arrivals})
        for arrival in step.arrivals:
            rows[arrival.item.group] += arrival.item.num_rows
        assert len(rows) == 3
        assert rows[0] > rows[2]
        assert rows[0] > rows[3]


def test_the_order_follows_the_nodes_unless_it_is_given() -> None:
    for order, one_node, two_nodes in (
        (None, False, True),
        ("ring", False, False),
        ("spread", True, True),
    ):
        exchange = ExchangePlan(order=order)  # type: ignore[arg-type]
        assert exchange.spreads(["a", "a"]) is one_node
        assert exchange.spreads(["a", "b"]) is two_nodes
    assert not ExchangePlan().spreads([None, None])  # a plan by hand knows no nodes


def test_radical_inverse() -> None:
    assert [radical_inverse(i) for i in range(6)] == [0, 1 / 2, 1 / 4, 3 / 4, 1 / 8, 5 / 8]


def test_replicas_of_a_kv_head_take_turns_in_serving_it() -> None:
    plan = Plan.from_splits(
        [Split((8, 8), (2, 2)), Split((8, 8), (2, 2))],
        num_kv_heads=1,
    )
    segments = BatchLayout(plan, 0, [32]).group_segments
    rounds = transfers(plan.replicas[0], segments, FULL, ExchangePlan(chunk_tokens=100))
    assert sorted((item.sender, item.receiver) for item in chain(*rounds)) == [
        (0, 2), (1, 3), (2, 0), (3, 1),
    ]  # fmt: skip
