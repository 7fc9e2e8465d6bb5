"""Where every rank's heads stand in the flat buffers of a group's all-to-all.

A rank trades its tokens of all heads for its heads of all tokens. The blocks for the other ranks
lie one after the other in `away`, so each is one message; the rank's own block stands at its rows
in `own`, which holds the rank's heads of all the group's tokens. Both directions use these places.

One block of keys and values is [tokens, 2, heads, D] for an atomic interval of KV heads, one of
queries [tokens, heads, D]; a slot is one head of one token (see kernels/pieces.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from hexiseq_triton.kernels.pieces import Piece, Pieces, Place
from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.planner.heads import HeadRange
from hexiseq_triton.segments import RowRange

SlotRange = tuple[int, int]
"""Slots [start, stop) of a flat buffer."""


class Member(NamedTuple):
    """One rank of the group: the rows it owns, and the heads it holds of all rows."""

    rank: int
    rows: RowRange
    q_heads: HeadRange
    kv_intervals: tuple[HeadRange, ...]


class Block(NamedTuple):
    """The slots of `away` that go to another rank, or come from it."""

    rank: int
    slots: SlotRange


@dataclass(frozen=True)
class GroupSlots:
    """The places of one rank's keys, values and queries, or of one kind alone.

    Attributes:
        pieces: all heads with their places; the tensors are k, v, q, or those that are there.
        kv_away: the blocks of keys and values, in the order of their messages.
        q_away: the blocks of queries.
        kv_own: the slots of `own` that hold each of the rank's KV intervals, all rows.
        q_own: the slots of `own` that hold the rank's query heads, all rows.
        num_away: slots of `away`.
        num_own: slots of `own`.
        replicated: some KV head stands on several ranks.
    """

    pieces: Pieces
    kv_away: tuple[Block, ...]
    q_away: tuple[Block, ...]
    kv_own: dict[HeadRange, SlotRange]
    q_own: SlotRange
    num_away: int
    num_own: int

    @property
    def replicated(self) -> bool:
        return any(len(piece.places) > 1 for piece in self.pieces)

    @cached_property
    def leaving(self) -> Pieces:
        """The pieces with their places in `away` alone."""
        return self._with_places(own=False)

    @cached_property
    def staying(self) -> Pieces:
        """The pieces with their places in `own` alone."""
        return self._with_places(own=True)

    def _with_places(self, *, own: bool) -> Pieces:
        found = (
            piece._replace(places=tuple(place for place in piece.places if place.own == own))
            for piece in self.pieces
        )
        return Pieces(piece for piece in found if piece.places)


def members_of(layout: BatchLayout) -> tuple[Member, ...]:
    """Return the ranks of this rank's group, in the group's row order."""
    return tuple(
        Member(share.rank, rows, share.q_heads, tuple(layout.intervals(share)))
        for share, rows in zip(layout.shares, layout.group_rows, strict=True)
    )


@lru_cache(maxsize=256)
def group_slots(
    members: tuple[Member, ...], rank: int, *, kv: bool = False, q: bool = False
) -> GroupSlots:
    """Lay out the buffers of `rank`; layouts that are alike share the result and its tables."""
    builder = _Builder(members, rank)
    kv_pieces, kv_away, kv_own = builder.lay_out("kv") if kv else ([], [], {})
    q_pieces, q_away, q_own = builder.lay_out("q", first_tensor=2 * kv) if q else ([], [], {})
    return GroupSlots(
        Pieces(kv_pieces + q_pieces),
        tuple(kv_away),
        tuple(q_away),
        kv_own,
        next(iter(q_own.values()), (builder.num_own, builder.num_own)),
        builder.num_away,
        builder.num_own,
    )


class _Builder:
    """Hands out slots: keys and values first, then queries."""

    def __init__(self, members: tuple[Member, ...], rank: int) -> None:
        self._members = members
        self._rank = rank
        self._total = members[-1].rows[1]
        self._rows = next(member.rows for member in members if member.rank == rank)
        self.num_away = 0
        self.num_own = 0

    def lay_out(
        self, kind: str, first_tensor: int = 0
    ) -> tuple[list[Piece], list[Block], dict[HeadRange, SlotRange]]:
        """Return the pieces of one kind, its blocks in `away`, and what each range has in `own`."""
        places: dict[HeadRange, list[Place]] = {}
        away: list[Block] = []
        own: dict[HeadRange, SlotRange] = {}
        num_tensors = 2 if kind == "kv" else 1
        for member in self._members:
            for heads in member.kv_intervals if kind == "kv" else (member.q_heads,):
                row = num_tensors * (heads[1] - heads[0])
                if member.rank == self._rank:
                    own[heads] = self._take_own(row)
                    place = Place(True, own[heads][0] + self._rows[0] * row, row)
                else:
                    away.append(Block(member.rank, self._take_away(row)))
                    place = Place(False, away[-1].slots[0], row)
                places.setdefault(heads, []).append(place)
        pieces = pieces_of_places(places, num_tensors, first_tensor)
        return pieces, away, own

    def _take_own(self, row: int) -> SlotRange:
        start, self.num_own = self.num_own, self.num_own + self._total * row
        return start, self.num_own

    def _take_away(self, row: int) -> SlotRange:
        num_tokens = self._rows[1] - self._rows[0]
        start, self.num_away = self.num_away, self.num_away + num_tokens * row
        return start, self.num_away


def pieces_of_places(
    places: dict[HeadRange, list[Place]], num_tensors: int, first_tensor: int
) -> list[Piece]:
    """Return the pieces of one kind, whose tensors lie side by side in each place; keys turn."""
    return [
        Piece(first_tensor + i, heads, i == 0, _shifted(stands_at, i * (heads[1] - heads[0])))
        for heads, stands_at in places.items()
        for i in range(num_tensors)
    ]


def _shifted(places: list[Place], slots: int) -> tuple[Place, ...]:
    return tuple(place._replace(start=place.start + slots) for place in places)
