"""The order in which KV travels between groups: one total order of transfers, packed into rounds.

Rank d needs, for its heads, the keys and values of every other group that its queries can see. A
*route* is direct: from the one rank of the other group that serves those heads to d, nothing is
forwarded. Routes are cut into transfers of bounded size. All transfers of a layer stand in one
order, by the time at which the receiver will need them, ties by (receiver, sender). Every rank
walks the order, so the two ends of a transfer always agree, and no cycle of waiting ranks can form.

Time is counted in key rows: in a balanced plan every rank works through all rows of the stream at
the same pace, its own first. What is needed within the same `window` chunks of time is one *round*
and travels together. So all ranks reach a round at about the same time, however much they own, and
while one round is worked on the next is under way.

Heads travel in *atomic intervals*: the KV heads between neighbouring cuts of all groups. Then the
rows of one interval are contiguous on the sender, and each is an attention chunk of its own.

Backward walks the same rounds; a partial dK/dV goes straight back to the transfer's sender.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hexiseq_triton.planner.heads import HeadRange
from hexiseq_triton.planner.plans import RankShare, ReplicaPlan
from hexiseq_triton.segments import Mask, RowRange, Segment, num_tokens, visible_rows


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
    round: int

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
    chunk_tokens: int,
    window: int,
) -> tuple[Transfer, ...]:
    """Return all transfers of one attention layer, in their total order, with their rounds.

    Args:
        replica: the groups and their ranks.
        group_segments: the segments of each group, in the group's row order.
        mask: what a query sees; rows no query of the receiver sees do not travel.
        chunk_tokens: most rows in one transfer.
        window: chunks that a rank works through in a round.
    """
    intervals = atomic_intervals(replica)
    group_rows = [num_tokens(segments) for segments in group_segments]
    # (need time, receiver, sender, serial number, transfer without its round)
    needed: list[tuple[float, int, int, int, Transfer]] = []
    for g, group in enumerate(replica.groups):
        rows_from = _rows_needed(g, group_segments, mask, chunk_tokens)
        for position, share in enumerate(group.ranks):
            passed = float(group_rows[g])
            for source, pieces in rows_from:
                # rows that nobody sees stay away, and the others take the longer
                pace = group_rows[source] / sum(map(_num_rows, pieces))
                for rows in pieces:
                    for interval in intervals_of(share, intervals):
                        sender = _server(replica.groups[source].ranks, interval, position)
                        item = Transfer(sender, share.rank, source, interval, rows, 0)
                        needed.append((passed, share.rank, sender, len(needed), item))
                    passed += pace * _num_rows(rows)
    needed.sort(key=lambda entry: entry[:4])
    first = needed[0][0] if needed else 0.0
    length = window * chunk_tokens
    return tuple(replace(item, round=_turn(time - first, length)) for time, *_, item in needed)


def _turn(time: float, length: int) -> int:
    """Return the round of a time; sums of fractions may fall just short of a whole round."""
    return int(time / length + 1e-6)


def _rows_needed(
    g: int, group_segments: Sequence[Sequence[Segment]], mask: Mask, chunk_tokens: int
) -> list[tuple[int, list[tuple[RowRange, ...]]]]:
    """Return (source group, rows of each chunk) for group g, in the order g consumes them."""
    count = len(group_segments)
    needed = []
    for step in range(1, count):
        source = (g - step) % count
        rows = visible_rows(group_segments[g], group_segments[source], mask)
        if rows:
            needed.append((source, _chunked(rows, chunk_tokens)))
    return needed


def _chunked(rows: Sequence[RowRange], chunk_tokens: int) -> list[tuple[RowRange, ...]]:
    """Cut row ranges into runs of at most `chunk_tokens` rows, as equal as they go."""
    total = _num_rows(rows)
    count = -(-total // chunk_tokens)
    edges = [total * i // count for i in range(1, count + 1)]
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


def _server(shares: Sequence[RankShare], interval: HeadRange, position: int) -> int:
    """Return which rank of the source group serves an interval; replicas take turns."""
    holders = [
        share.rank
        for share in shares
        if share.kv_heads[0] <= interval[0] and interval[1] <= share.kv_heads[1]
    ]
    return holders[position % len(holders)]


def _num_rows(rows: Iterable[RowRange]) -> int:
    return sum(stop - start for start, stop in rows)
