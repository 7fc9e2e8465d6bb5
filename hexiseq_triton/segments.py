"""Which tokens: segments of documents, and which keys a query sees.

A shard is a sequence of segments; its rows in memory stand in segment order. Inside a segment the
positions are affine, so a mask never needs an array of positions. Zigzag halves, chunks and
document cuts are all just segments.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hexiseq_triton.errors import ConfigError

RowRange = tuple[int, int]


class Segment(NamedTuple):
    """Positions [start, stop) of one document."""

    document: int
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


class Mask(NamedTuple):
    """A query at position i sees keys of its document at i - left ... i + right, both included.

    None is unbounded: `Mask(None, 0)` is causal, `Mask(None, None)` full attention.
    """

    left: int | None
    right: int | None

    @staticmethod
    def from_flash(causal: bool, window_size: tuple[int, int]) -> Mask:
        """Read flash-attention's arguments: -1 is unbounded, causal bounds the right side by 0."""
        for side in window_size:
            if side < -1:
                raise ConfigError(
                    f"window_size is {tuple(window_size)}; each side must be -1 (unbounded) or >= 0"
                )
        # a side beyond every position is none: a position plus such a number may pass 2**63
        left, right = (None if side == -1 or side >= _FAR else side for side in window_size)
        return Mask(left, 0 if causal else right)

    def keys_of(self, start: int, stop: int) -> RowRange:
        """Return the positions that some query of [start, stop) sees, before document bounds."""
        low = 0 if self.left is None else max(0, start - self.left)
        high = _FAR if self.right is None else stop + self.right
        return low, high


CAUSAL = Mask(None, 0)
FULL = Mask(None, None)
_FAR = 1 << 62


def num_tokens(segments: Iterable[Segment]) -> int:
    """Return how many tokens the segments hold."""
    return sum(segment.num_tokens for segment in segments)


def whole_documents(lengths: Sequence[int]) -> list[Segment]:
    """Return one segment for each document that is not empty."""
    return [Segment(i, 0, length) for i, length in enumerate(lengths) if length]


def merge(segments: Iterable[Segment]) -> list[Segment]:
    """Join segments that continue each other, in the given order; drop empty ones."""
    merged: list[Segment] = []
    for segment in segments:
        if not segment.num_tokens:
            continue
        last = merged[-1] if merged else None
        if last and last.document == segment.document and last.stop == segment.start:
            merged[-1] = last._replace(stop=segment.stop)
        else:
            merged.append(segment)
    return merged


def cut(segments: Iterable[Segment], sizes: Sequence[int]) -> list[list[Segment]]:
    """Cut the tokens of `segments` into consecutive runs of the given sizes, which must add up."""
    rest = iter(segments)
    runs: list[list[Segment]] = []
    current: Segment | None = None
    for size in sizes:
        run: list[Segment] = []
        while size:
            current = current if current and current.num_tokens else next(rest)
            taken = min(size, current.num_tokens)
            run.append(current._replace(stop=current.start + taken))
            current = current._replace(start=current.start + taken)
            size -= taken
        runs.append(merge(run))
    left = num_tokens(rest) + (current.num_tokens if current else 0)
    assert left == 0, "sizes do not add up"
    return runs


def take(segments: Iterable[Segment], rows: Iterable[RowRange]) -> list[Segment]:
    """Return the segments that stand in the given row ranges, sorted and disjoint."""
    starts = []
    row = 0
    for segment in segments:
        starts.append((row, segment))
        row += segment.num_tokens
    taken = []
    for low, high in rows:
        first = max(0, bisect_right(starts, low, key=lambda entry: entry[0]) - 1)
        for row, segment in starts[first:]:
            if row >= high:
                break
            start = segment.start + max(low - row, 0)
            stop = segment.start + min(high - row, segment.num_tokens)
            taken.append(segment._replace(start=start, stop=stop))
    return merge(taken)


def rows_by_document(segments: Iterable[Segment]) -> dict[int, list[tuple[Segment, int]]]:
    """Return, for each document, its segments here with the row at which each begins."""
    found: dict[int, list[tuple[Segment, int]]] = defaultdict(list)
    row = 0
    for segment in segments:
        found[segment.document].append((segment, row))
        row += segment.num_tokens
    return found


def visible_rows(
    q_segments: Sequence[Segment], kv_segments: Sequence[Segment], mask: Mask
) -> list[RowRange]:
    """Return the row ranges of `kv_segments` that at least one query of `q_segments` sees."""
    wanted: dict[int, list[RowRange]] = defaultdict(list)
    for segment in merge(q_segments):
        wanted[segment.document].append(mask.keys_of(segment.start, segment.stop))
    unions = {document: union(ranges) for document, ranges in wanted.items()}

    rows: list[RowRange] = []
    row = 0
    for segment in kv_segments:
        for low, high in _overlapping(unions.get(segment.document, []), segment):
            first, last = max(low, segment.start), min(high, segment.stop)
            rows.append((row + first - segment.start, row + last - segment.start))
        row += segment.num_tokens
    return union(rows)


def _overlapping(ranges: list[RowRange], segment: Segment) -> list[RowRange]:
    """Return those of the sorted disjoint `ranges` that meet the segment."""
    first = max(0, bisect_right(ranges, (segment.start, _FAR)) - 1)
    met = []
    for low, high in ranges[first:]:
        if low >= segment.stop:
            break
        if high > segment.start:
            met.append((low, high))
    return met


def union(ranges: Iterable[RowRange]) -> list[RowRange]:
    """Return the union of half-open ranges as sorted, disjoint, non-touching ranges."""
    joined: list[RowRange] = []
    for low, high in sorted(r for r in ranges if r[0] < r[1]):
        if joined and low <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    return joined


def visible_pairs(q_segments: Sequence[Segment], kv_segments: Sequence[Segment], mask: Mask) -> int:
    """Return how many (query, key) pairs the mask lets through: the work of attention."""
    keys = rows_by_document(kv_segments)
    return sum(
        pairs(q.start, q.stop, k.start, k.stop, mask)
        for q in q_segments
        for k, _ in keys.get(q.document, [])
    )


def pairs(q_start: int, q_stop: int, k_start: int, k_stop: int, mask: Mask) -> int:
    """Return the visible (query, key) pairs of two position ranges of one document."""
    width = k_stop - k_start
    # keys at or before i + right, less the keys before i - left
    seen = width * (q_stop - q_start)
    if mask.right is not None:
        shift = mask.right + 1 - k_start
        seen = _clamped_sum(q_start + shift, q_stop + shift, width)
    if mask.left is not None:
        shift = -mask.left - k_start
        seen -= _clamped_sum(q_start + shift, q_stop + shift, width)
    return seen


def _clamped_sum(low: int, high: int, top: int) -> int:
    """Return the sum of min(max(x, 0), top) over the integers x of [low, high)."""

    def below(x: int) -> int:  # the same sum over [0, x)
        ramp = min(max(x, 0), top)
        return ramp * (ramp - 1) // 2 + top * max(x - top, 0)

    return below(high) - below(low)
