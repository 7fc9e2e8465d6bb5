"""Dealing tokens: every token once, counts exact, attention work in the plan's proportions."""

from __future__ import annotations

import random

import pytest
from drawn_plans import Case, cases
from hypothesis import given
from hypothesis import strategies as st

from hexiseq_triton.planner import ExchangePlan, Plan, Split
from hexiseq_triton.planner.partition import apportion, balanced, deal, mirrored
from hexiseq_triton.segments import CAUSAL, FULL, Segment, num_tokens, visible_pairs


@given(st.integers(0, 1000), st.lists(st.integers(0, 50), min_size=1, max_size=9))
def test_apportion_is_exact_and_within_one_of_the_share(total: int, weights: list[int]) -> None:
    shares = apportion(total, weights)
    assert sum(shares) == total
    if any(weights):
        for share, weight in zip(shares, weights, strict=True):
            assert abs(share - total * weight / sum(weights)) < 1
            assert weight or not share


@given(st.lists(st.integers(0, 60), min_size=1, max_size=7).filter(any))
def test_mirrored_pieces_have_work_linear_in_tokens(group_tokens: list[int]) -> None:
    total = sum(group_tokens)
    document = Segment(0, 0, total)
    pieces = mirrored(document, group_tokens)
    seen = sorted(p for group in pieces for s in group for p in range(s.start, s.stop))
    assert seen == list(range(total))
    for group, tokens in zip(pieces, group_tokens, strict=True):
        assert num_tokens(group) == tokens
        doubled = 2 * visible_pairs(group, [document], CAUSAL)
        if tokens % 2 == 0:
            assert doubled == tokens * (total + 1)
        else:
            assert abs(doubled - tokens * (total + 1)) <= total + tokens


@given(st.lists(st.integers(1, 40).map(lambda n: 2 * n), min_size=2, max_size=5))
def test_off_diagonal_blocks_are_exactly_half(group_tokens: list[int]) -> None:
    pieces = mirrored(Segment(0, 0, sum(group_tokens)), group_tokens)
    for a, queries in enumerate(pieces):
        for b, keys in enumerate(pieces):
            if a != b:
                expected = group_tokens[a] * group_tokens[b]
                assert 2 * visible_pairs(queries, keys, CAUSAL) == expected


@given(cases())
def test_every_token_has_one_owner_in_the_plans_proportions(case: Case) -> None:
    (lengths,) = case.lengths
    dealt = deal(case.plan, 0, lengths)
    owned = [
        (s.document, p)
        for group in dealt
        for rank in group
        for s in rank
        for p in range(s.start, s.stop)
    ]
    assert sorted(owned) == [(d, p) for d, length in enumerate(lengths) for p in range(length)]
    groups = case.plan.replicas[0].groups
    expected = apportion(sum(lengths), [group.tokens for group in groups])
    assert [sum(map(num_tokens, group)) for group in dealt] == expected
    if sum(lengths) == case.plan.seq_len and case.plan.seq_len:
        counts = [num_tokens(rank) for group in dealt for rank in group]
        assert counts == [share.tokens for share in case.plan.shares]


@pytest.mark.parametrize("weights", [[3, 1, 1, 1], [5, 3], [1] * 8, [7, 1]])
@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=["causal", "full"])
def test_packed_documents_balance_tokens_and_work(weights: list[int], mask: object) -> None:
    drawn = random.Random(0)
    lengths = [min(int(drawn.paretovariate(1.1) * 60), 8000) for _ in range(300)]
    group_tokens = apportion(sum(lengths), weights)
    whole = [Segment(d, 0, length) for d, length in enumerate(lengths)]
    total = visible_pairs(whole, whole, mask)  # type: ignore[arg-type]
    for group, weight in zip(balanced(lengths, group_tokens, mask), weights, strict=True):  # type: ignore[arg-type]
        share = visible_pairs(group, whole, mask) / total  # type: ignore[arg-type]
        assert share == pytest.approx(weight / sum(weights), rel=0.01)


def test_short_documents_stay_whole_where_counts_allow() -> None:
    dealt = balanced([16] * 64, [512, 512], CAUSAL)
    assert all(s.num_tokens == 16 for group in dealt for s in group)


def test_contiguous_arrangement_keeps_the_stream_order() -> None:
    plan = Plan.from_splits(
        [Split((6,), (2,)), Split((4,), (2,))], exchange=ExchangePlan("contiguous")
    )
    assert deal(plan, 0, [10]) == [[[Segment(0, 0, 6)]], [[Segment(0, 6, 10)]]]


def test_a_longer_batch_is_dealt_in_the_plans_proportions() -> None:
    plan = Plan.from_splits([Split((6, 2), (1, 1)), Split((2,), (2,))])
    dealt = deal(plan, 0, [100])
    assert [[num_tokens(rank) for rank in group] for group in dealt] == [[60, 20], [20]]
