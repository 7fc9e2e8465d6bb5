"""Rounds of the exchange as one rank works on them, and where their rows stand.

What arrives for one interval of KV heads in a round is one attention launch. So which chunks share
a launch follows from the plan, and never from what happened to arrive first.

Rows stand in pools, one for each interval: of the keys and values that arrive with their partial
gradients, and of the partial gradients that come back for what departed. A pool has two halves that
rounds take in turns, each with room for the fullest round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hexiseq_triton.kernels.options import PlacedSegment, placed
from hexiseq_triton.kernels.partials import Piece, pieces_of
from hexiseq_triton.planner.heads import HeadRange
from hexiseq_triton.planner.schedule import Transfer
from hexiseq_triton.segments import RowRange, Segment

PoolRows = dict[HeadRange, int]
"""Rows of each interval's pool."""


class Arrival(NamedTuple):
    """A transfer to this rank, with the positions of its rows."""

    item: Transfer
    segments: tuple[Segment, ...]


class Round(NamedTuple):
    """One round of the exchange, seen from one rank, in the total order of transfers."""

    departures: tuple[Transfer, ...] = ()
    arrivals: tuple[Arrival, ...] = ()


class Placed(NamedTuple):
    """A transfer, and its rows in the pool: of the arrival, or of the partial that returns."""

    item: Transfer
    rows: RowRange


@dataclass(frozen=True)
class PlacedRound:
    """A round with its place in the pools.

    Attributes:
        departures: what leaves, and where its partial gradients come back.
        arrivals: what comes.
        launches: what one launch for each interval sees, placed in the interval's pool.
        half: the rows of each interval's pool that the arrivals take.
        returns: for each interval, what the returned partials add to this rank's own rows.
    """

    departures: tuple[Placed, ...]
    arrivals: tuple[Placed, ...]
    launches: dict[HeadRange, tuple[PlacedSegment, ...]]
    half: dict[HeadRange, RowRange]
    returns: dict[HeadRange, tuple[Piece, ...]]


@dataclass(frozen=True)
class Exchange:
    """All rounds of one attention call, and the size of the pools they share."""

    rounds: tuple[PlacedRound, ...]
    arrival_rows: PoolRows
    return_rows: PoolRows


def exchange_of(rounds: Sequence[Round]) -> Exchange:
    """Return a rank's rounds, placed."""
    arriving = _Halves([[arrival.item for arrival in step.arrivals] for step in rounds])
    returning = _Halves([step.departures for step in rounds])
    placed_rounds = tuple(_placed(step, arriving, returning) for step in rounds)
    return Exchange(placed_rounds, arriving.pool_rows, returning.pool_rows)


class _Halves:
    """Hands out the rows of the pools, one half after the other to rounds that need any."""

    def __init__(self, rounds: Iterable[Sequence[Transfer]]) -> None:
        used = [items for items in rounds if items]
        self._rows = _most_rows(used)
        self._turn = 0
        halves = min(2, len(used))
        self.pool_rows = {interval: halves * rows for interval, rows in self._rows.items()}

    def place(self, items: Sequence[Transfer]) -> tuple[Placed, ...]:
        """Return the transfers of the next round with their rows."""
        if not items:
            return ()
        free = {interval: self._turn % 2 * rows for interval, rows in self._rows.items()}
        self._turn += 1
        found = []
        for item in items:
            start = free[item.kv_heads]
            free[item.kv_heads] = start + item.num_rows
            found.append(Placed(item, (start, free[item.kv_heads])))
        return tuple(found)


def _most_rows(rounds: Iterable[Sequence[Transfer]]) -> PoolRows:
    """Return the most rows of each interval that move in one round."""
    most: PoolRows = defaultdict(int)
    for items in rounds:
        rows: PoolRows = defaultdict(int)
        for item in items:
            rows[item.kv_heads] += item.num_rows
        for interval, count in rows.items():
            most[interval] = max(most[interval], count)
    return dict(most)


def _placed(step: Round, arriving: _Halves, returning: _Halves) -> PlacedRound:
    departures = returning.place(step.departures)
    arrivals = arriving.place([arrival.item for arrival in step.arrivals])
    launches: dict[HeadRange, tuple[PlacedSegment, ...]] = defaultdict(tuple)
    half: dict[HeadRange, RowRange] = {}
    partials: dict[HeadRange, list[tuple[Sequence[RowRange], int]]] = defaultdict(list)
    for (item, rows), (_, segments) in zip(arrivals, step.arrivals, strict=True):
        launches[item.kv_heads] += placed(segments, rows[0])
        half[item.kv_heads] = (half.get(item.kv_heads, rows)[0], rows[1])
    for item, rows in departures:
        partials[item.kv_heads].append((item.rows, rows[0]))
    returns = {interval: pieces_of(found) for interval, found in partials.items()}
    return PlacedRound(departures, arrivals, dict(launches), half, returns)
