"""Rounds of the exchange that are worked on together, and where their rows stand.

A batch is `window` rounds in a row, on every rank alike: while one is worked on, the next is in
flight. What arrives for one interval of KV heads in a batch is one attention launch. So which
chunks share a launch follows from the plan, and never from what happened to arrive first.

Rows stand in pools, one for each interval. A pool has two halves that batches take in turns, each
with room for the fullest batch: of the keys and values that arrive with their partial gradients,
and of the partial gradients that come back for what departed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from hexiseq_triton.kernels.options import PlacedSegment, placed
from hexiseq_triton.kernels.partials import Piece, pieces_of
from hexiseq_triton.planner.heads import HeadRange
from hexiseq_triton.planner.schedule import Transfer
from hexiseq_triton.segments import RowRange, Segment

PoolRows = dict[HeadRange, int]
"""Rows of each interval's pool."""


@dataclass(frozen=True)
class Round:
    """One round of the exchange, seen from one rank: at most one departure and one arrival.

    `arrival_segments` are the positions of the arriving rows.
    """

    departure: Transfer | None = None
    arrival: Transfer | None = None
    arrival_segments: tuple[Segment, ...] = ()


@dataclass(frozen=True)
class Step:
    """A round with the pool rows of its arrival, and of the partial that its departure returns."""

    round: Round
    arrival_rows: RowRange = (0, 0)
    return_rows: RowRange = (0, 0)


@dataclass(frozen=True)
class Batch:
    """Rounds that are in flight, and then worked on, together.

    Attributes:
        steps: the rounds in order.
        arrivals: what one launch for each interval sees, placed in the interval's pool.
        half: the rows of each interval's pool that the arrivals take.
        returns: for each interval, what the returned partials add to this rank's own rows.
    """

    steps: tuple[Step, ...]
    arrivals: dict[HeadRange, tuple[PlacedSegment, ...]]
    half: dict[HeadRange, RowRange]
    returns: dict[HeadRange, tuple[Piece, ...]]


@dataclass(frozen=True)
class Exchange:
    """All batches of one attention call, and the size of the pools they share."""

    batches: tuple[Batch, ...]
    arrival_rows: PoolRows
    return_rows: PoolRows


def exchange_of(rounds: Sequence[Round], window: int) -> Exchange:
    """Return the batches of a rank's rounds."""
    groups = [rounds[i : i + window] for i in range(0, len(rounds), window)]
    arriving = _half_sizes([[step.arrival for step in group] for group in groups])
    returning = _half_sizes([[step.departure for step in group] for group in groups])
    batches = tuple(
        _batch(
            group,
            {interval: i % 2 * rows for interval, rows in arriving.items()},
            {interval: i % 2 * rows for interval, rows in returning.items()},
        )
        for i, group in enumerate(groups)
    )
    halves = min(2, len(batches))
    return Exchange(
        batches,
        {interval: halves * rows for interval, rows in arriving.items()},
        {interval: halves * rows for interval, rows in returning.items()},
    )


def _half_sizes(groups: Sequence[Sequence[Transfer | None]]) -> PoolRows:
    """Return the most rows of each interval that move in one batch."""
    most: PoolRows = defaultdict(int)
    for group in groups:
        rows: PoolRows = defaultdict(int)
        for item in group:
            if item is not None:
                rows[item.kv_heads] += item.num_rows
        for interval, count in rows.items():
            most[interval] = max(most[interval], count)
    return dict(most)


def _batch(rounds: Sequence[Round], arrive_at: PoolRows, return_at: PoolRows) -> Batch:
    """Hand out pool rows to rounds, from the given first row of each interval on."""
    steps = []
    arrivals: dict[HeadRange, tuple[PlacedSegment, ...]] = defaultdict(tuple)
    half: dict[HeadRange, RowRange] = {}
    partials: dict[HeadRange, list[tuple[Sequence[RowRange], int]]] = defaultdict(list)
    for step in rounds:
        arrival_rows = return_rows = (0, 0)
        if step.arrival:
            interval = step.arrival.kv_heads
            arrival_rows = _take(arrive_at, step.arrival)
            arrivals[interval] += placed(step.arrival_segments, arrival_rows[0])
            half[interval] = (half.get(interval, arrival_rows)[0], arrival_rows[1])
        if step.departure:
            return_rows = _take(return_at, step.departure)
            partials[step.departure.kv_heads].append((step.departure.rows, return_rows[0]))
        steps.append(Step(step, arrival_rows, return_rows))
    returns = {interval: pieces_of(found) for interval, found in partials.items()}
    return Batch(tuple(steps), dict(arrivals), half, returns)


def _take(free: PoolRows, item: Transfer) -> RowRange:
    """Return the next rows of the transfer's pool."""
    start = free[item.kv_heads]
    free[item.kv_heads] = start + item.num_rows
    return start, free[item.kv_heads]
