"""The order in which KV travels between groups: one total order of transfers, packed into rounds.

Rank d needs, for its heads, the keys and values of every other group that its queries can see. A
*route* is direct: from the one rank of the other group that serves those heads to d, nothing is
forwarded. Routes are cut into transfers of bounded size. All transfers of a layer stand in one
order, by the time at which the receiver will need them, ties by (receiver, sender). Every rank
walks the order, so the two ends of a transfer always agree, and no cycle of waiting ranks can form.

Time is a rank's progress through its own work, counted in rows of the stream: all ranks begin at 0
and end at its length. A rank works on its own keys first, then on those of the others:

    ring      one group's after the other's, in turns, as if they went round a ring
    spread    a piece of every group's at any time. Inside a node bytes take the same port wherever
              they come from; a rank with neighbours in its node and others far away would leave its
              NIC idle while it works on the near ones, and then wait for it

What is needed within the same `window` chunks of time is one *round* and travels together. So all
ranks reach a round at about the same time, however much they own, and while one round is worked on
the next is under way.

Heads travel in *atomic intervals*: the KV heads between neighbouring cuts of all groups. Then the
rows of one interval are contiguous on the sender, and each is an attention chunk of its own.

Backward walks the same rounds; a partial dK/dV goes straight back to the transfer's sender.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hexiseq_triton.planner.heads import HeadRange
from hexiseq_triton.planner.plans import ExchangePlan, RankShare, ReplicaPlan
from hexiseq_triton.segments import (
    Mask,
    RowRange,
    Segment,
    num_tokens,
    visible_pairs,
    visible_rows,
)

SMALL = 8
"""A piece has at least a chunk over this in rows, if the order may choose."""
KEY_BLOCK = 128
"""The most keys that a kernel works on at once."""
CLOSE = 1 / 64
"""Chunks of time: work is in proportion to rows but for the diagonal, and sums of fractions may
fall just short."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """KV rows of one atomic head interval, from the rank that serves them to one that needs them.

    `rows` are ranges of the sender group's token order; `group` is the sender's group.
    """

    sender: int
    receiver: int
    group: int
    kv_heads: HeadRange
    rows: tuple[RowRange, ...]

    @property
    def num_rows(self) -> int:
        return _num_rows(self.rows)


def atomic_intervals(replica: ReplicaPlan) -> list[HeadRange]:
    """Return the KV head intervals between neighbouring cuts of all ranks of the replica."""
    cuts = {edge for share in replica.shares if share.num_kv_heads for edge in share.kv_heads}
    return list(pairwise(sorted(cuts)))


def intervals_of(share: RankShare, intervals: Sequence[HeadRange]) -> list[HeadRange]:
    """Return the atomic intervals that lie in the rank's KV heads."""
    start, stop = share.kv_heads
    return [i for i in intervals if start <= i[0] and i[1] <= stop]


def transfers(
    replica: ReplicaPlan,
    group_segments: Sequence[Sequence[Segment]],
    mask: Mask,
    exchange: ExchangePlan,
    rank: int | None = None,
) -> list[list[Transfer]]:
    """Return the transfers of one attention layer, round by round, in their total order.

    Args:
        replica: the groups and their ranks.
        group_segments: the segments of each group, in the group's row order.
        mask: what a query sees; rows no query of the receiver sees do not travel.
        exchange: most rows in one transfer, chunks that a rank works through in a round, and order.
        rank: whose transfers; those of all if left out. A round may have none of them.
    """
    intervals = atomic_intervals(replica)
    holders = [_holders(group.ranks, intervals) for group in replica.groups]
    spread = exchange.spreads(share.node for share in replica.shares)
    pieces = [
        (time, g, source, rows)
        for g in range(len(replica.groups))
        for time, source, rows in _needed(g, group_segments, mask, exchange.chunk_tokens, spread)
    ]
    first = min((time for time, *_ in pieces), default=0.0)
    rounds: dict[int, list[tuple[float, Transfer]]] = {}
    for time, g, source, rows in pieces:
        number = int((time - first) / exchange.chunk_tokens + CLOSE) // exchange.window
        found = rounds.setdefault(number, [])
        for position, share in enumerate(replica.groups[g].ranks):
            for interval in intervals_of(share, intervals):
                served_by = holders[source][interval]
                sender = served_by[position % len(served_by)]  # they take turns
                if rank in (None, sender, share.rank):
                    item = Transfer(sender, share.rank, source, interval, rows)
                    found.append((time, item))
    return [[item for _, item in sorted(found, key=_place)] for _, found in sorted(rounds.items())]


def _place(entry: tuple[float, Transfer]) -> tuple[float, int, int]:
    time, item = entry
    return time, item.receiver, item.sender


def _holders(
    shares: Sequence[RankShare], intervals: Sequence[HeadRange]
) -> dict[HeadRange, list[int]]:
    """Return the ranks of a group that hold each interval."""
    found: dict[HeadRange, list[int]] = {interval: [] for interval in intervals}
    for share in shares:
        for interval in intervals_of(share, intervals):
            found[interval].append(share.rank)
    return found


def _needed(
    g: int,
    group_segments: Sequence[Sequence[Segment]],
    mask: Mask,
    chunk_tokens: int,
    spread: bool,
) -> Iterator[tuple[float, int, tuple[RowRange, ...]]]:
    """Yield when group g needs what: time, source group, rows."""
    group_rows = [num_tokens(segments) for segments in group_segments]
    count = len(group_segments)
    sources = [
        (source, rows)
        for source in ((g - step) % count for step in range(1, count))
        if (rows := visible_rows(group_segments[g], group_segments[source], mask))
    ]
    # rows that nobody sees stay away, and the others take the longer
    ahead = sum(group_rows[source] for source, _ in sources)
    work = [visible_pairs(group_segments[g], segments, mask) for segments in group_segments]
    start, length = others_turn(sum(group_rows), ahead, work[g] / max(1, sum(work)))
    for turn, (source, rows) in enumerate(sources):
        total = _num_rows(rows)
        lasts = length if spread else length * group_rows[source] / ahead
        pieces = num_pieces(total, lasts, chunk_tokens, spread)
        phase = radical_inverse(turn) if spread else 0.0
        for i, piece in enumerate(_cut(rows, piece_edges(total, pieces, chunk_tokens))):
            yield start + lasts * (i + phase) / pieces, source, piece
        start += 0.0 if spread else lasts


def others_turn(stream: float, ahead: float, own_share: float) -> tuple[float, float]:
    """Return when a rank turns to other groups' keys, and for how long.

    Args:
        stream: tokens of the replica.
        ahead: those of the groups that it fetches from: no more arrive in any time than it lasts.
        own_share: the part of its work that is on its own group's keys.
    """
    start = min(stream * own_share, stream - ahead)
    return start, stream - start


def num_pieces(rows: float, time: float, chunk_tokens: int, spread: bool) -> int:
    """Return into how many transfers the rows of one group are cut that are needed in that time.

    In the order "spread" there is one for each chunk of time, unless they would be very small.
    """
    fewest = math.ceil(rows / chunk_tokens)
    if not spread:
        return fewest
    most = max(fewest, int(rows // max(1, chunk_tokens // SMALL)))
    return max(fewest, min(most, math.ceil(time / chunk_tokens - CLOSE)))


def piece_edges(rows: int, pieces: int, chunk_tokens: int) -> list[int]:
    """Return where pieces end, as equal as they go; long ones in whole blocks of the kernels."""
    block = math.gcd(chunk_tokens, KEY_BLOCK) if chunk_tokens >= SMALL * KEY_BLOCK else 1
    blocks = -(-rows // block)
    return [min(rows, blocks * i // pieces * block) for i in range(1, pieces + 1)]


def radical_inverse(i: int) -> float:
    """Return the i-th of 0, 1/2, 1/4, 3/4, 1/8, 5/8, ..: any first few lie evenly in [0, 1)."""
    found, part = 0.0, 0.5
    while i:
        found += part * (i % 2)
        i, part = i // 2, part / 2
    return found


def _cut(rows: Sequence[RowRange], edges: Sequence[int]) -> list[tuple[RowRange, ...]]:
    """Cut row ranges into runs that end after so many rows."""
    chunks: list[list[RowRange]] = [[]]
    seen = 0
    for start, stop in rows:
        while start < stop:
            taken = min(stop - start, edges[len(chunks) - 1] - seen)
            if not taken:
                chunks.append([])
                continue
            chunks[-1].append((start, start + taken))
            start += taken
            seen += taken
    return [tuple(chunk) for chunk in chunks]


def _num_rows(rows: Iterable[RowRange]) -> int:
    return sum(stop - start for start, stop in rows)
