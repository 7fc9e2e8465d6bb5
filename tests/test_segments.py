"""Segments against sets of (document, position)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hexiseq_triton.segments import (
    Mask,
    Segment,
    cut,
    merge,
    num_tokens,
    take,
    union,
    visible_pairs,
    visible_rows,
)

segment_lists = st.lists(
    st.builds(
        lambda d, start, length: Segment(d, start, start + length),
        st.integers(0, 2),
        st.integers(0, 30),
        st.integers(0, 12),
    ),
    max_size=6,
)
sides = st.one_of(st.none(), st.integers(0, 15))
masks = st.builds(Mask, sides, sides)


def tokens(segments: list[Segment]) -> list[tuple[int, int]]:
    """Return (document, position) of every row."""
    return [(s.document, p) for s in segments for p in range(s.start, s.stop)]


def sees(mask: Mask, query: tuple[int, int], key: tuple[int, int]) -> bool:
    (document, i), (other, j) = query, key
    left = mask.left is None or j >= i - mask.left
    right = mask.right is None or j <= i + mask.right
    return document == other and left and right


@given(segment_lists, segment_lists, masks)
def test_visible_pairs_are_counted_one_by_one(q: list[Segment], k: list[Segment], m: Mask) -> None:
    assert visible_pairs(q, k, m) == sum(sees(m, i, j) for i in tokens(q) for j in tokens(k))


@given(segment_lists, segment_lists, masks)
def test_visible_rows_are_those_some_query_sees(
    q: list[Segment], k: list[Segment], m: Mask
) -> None:
    kept = [row for start, stop in visible_rows(q, k, m) for row in range(start, stop)]
    seen = [row for row, key in enumerate(tokens(k)) if any(sees(m, i, key) for i in tokens(q))]
    assert kept == seen


@given(segment_lists, st.lists(st.integers(0, 20), max_size=6))
def test_take_returns_the_rows_asked_for(segments: list[Segment], edges: list[int]) -> None:
    rows = tokens(segments)
    bounds = sorted(min(edge, len(rows)) for edge in edges)
    ranges = union(zip(bounds[::2], bounds[1::2], strict=False))
    expected = [rows[row] for start, stop in ranges for row in range(start, stop)]
    assert tokens(take(segments, ranges)) == expected


@given(segment_lists, st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_cut_keeps_every_token_in_order(segments: list[Segment], weights: list[int]) -> None:
    total = num_tokens(segments)
    sizes = [min(w, total) for w in weights[:-1]]
    while sum(sizes) > total:
        sizes.pop()
    sizes.append(total - sum(sizes))
    runs = cut(segments, sizes)
    assert [num_tokens(run) for run in runs] == sizes
    assert [t for run in runs for t in tokens(run)] == tokens(segments)


def test_merge_joins_what_continues_and_nothing_else() -> None:
    parts = [
        Segment(0, 0, 3),
        Segment(0, 3, 5),
        Segment(0, 6, 7),
        Segment(1, 7, 7),
        Segment(1, 7, 9),
    ]
    assert merge(parts) == [Segment(0, 0, 5), Segment(0, 6, 7), Segment(1, 7, 9)]
