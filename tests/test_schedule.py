"""The order of transfers: nothing missing, nothing twice, no port used twice in a round."""

from __future__ import annotations

from collections import Counter

from drawn_plans import Case, cases
from hypothesis import given

from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.planner import Plan, Split
from hexiseq_triton.planner.schedule import atomic_intervals, intervals_of, transfers
from hexiseq_triton.segments import CAUSAL, FULL, Mask, visible_rows


def scheduled(case: Case) -> tuple[BatchLayout, Mask, tuple]:  # type: ignore[type-arg]
    layout = BatchLayout(case.plan, case.plan.shares[0].rank, case.lengths[0])
    mask = CAUSAL if case.options["causal"] else FULL
    chunk = case.plan.exchange.chunk_tokens
    return layout, mask, transfers(case.plan.replicas[0], layout.group_segments, mask, chunk)


@given(cases())
def test_each_rank_gets_each_visible_row_of_its_heads_once(case: Case) -> None:
    layout, mask, ordered = scheduled(case)
    replica = case.plan.replicas[0]
    intervals = atomic_intervals(replica)
    got = Counter(
        (item.receiver, item.group, item.kv_heads, row)
        for item in ordered
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
    _, _, ordered = scheduled(case)
    held = {share.rank: share.kv_heads for share in case.plan.shares}
    for item in ordered:
        assert held[item.sender][0] <= item.kv_heads[0] < item.kv_heads[1] <= held[item.sender][1]
        assert held[item.receiver][0] <= item.kv_heads[0]
        assert item.kv_heads[1] <= held[item.receiver][1]
        assert 0 < item.num_rows <= case.plan.exchange.chunk_tokens
        assert item.sender != item.receiver


@given(cases())
def test_a_rank_has_one_arrival_and_one_departure_a_round(case: Case) -> None:
    _, _, ordered = scheduled(case)
    for end in ("sender", "receiver"):
        ports = Counter((getattr(item, end), item.round) for item in ordered)
        assert set(ports.values()) <= {1}


@given(cases())
def test_both_ends_see_the_same_rounds(case: Case) -> None:
    mask = CAUSAL if case.options["causal"] else FULL
    left, came = Counter(), Counter()  # type: ignore[var-annotated]
    counts = set()
    for share in case.plan.replicas[0].shares:
        rounds = BatchLayout(case.plan, share.rank, case.lengths[0]).rounds(mask)
        counts.add(len(rounds))
        for r, step in enumerate(rounds):
            if step.departure:
                left[(r, share.rank, step.departure.receiver, step.departure.rows)] += 1
            if step.arrival:
                came[(r, step.arrival.sender, share.rank, step.arrival.rows)] += 1
                assert sum(s.num_tokens for s in step.arrival_segments) == step.arrival.num_rows
    assert left == came
    assert len(counts) == 1


def test_equal_groups_need_no_more_rounds_than_a_ring() -> None:
    plan = Plan.from_splits(*[[Split((64,), (4,)) for _ in range(8)]])
    layout = BatchLayout(plan, 0, [512])
    assert len(layout.rounds(FULL)) == 7


def test_replicas_of_a_kv_head_take_turns_in_serving_it() -> None:
    plan = Plan.from_splits(
        [Split((8, 8), (2, 2)), Split((8, 8), (2, 2))],
        num_kv_heads=1,
    )
    ordered = transfers(
        plan.replicas[0], BatchLayout(plan, 0, [32]).group_segments, FULL, chunk_tokens=100
    )
    assert sorted((item.sender, item.receiver) for item in ordered) == [
        (0, 2), (1, 3), (2, 0), (3, 1),
    ]  # fmt: skip
