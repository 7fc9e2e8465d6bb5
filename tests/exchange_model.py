"""When the last rank is done with attention if transfers take time: the exchange as arithmetic.

Follows `hexiseq_triton.exchange` and `ring`: transfers of a rank follow each other in the order of
rounds, keys of round r + 2 behind the returns of round r; each begins when its room is free and the
rank at its other end is there too. Ranks are as fast as their work is large, so without transfers
all are done at time 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from hexiseq_triton.launches import own_shares
from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.planner import Plan
from hexiseq_triton.planner.schedule import Transfer
from hexiseq_triton.rounds import PlacedRound
from hexiseq_triton.segments import CAUSAL, visible_pairs


class _Rank:
    """One rank: its work, and until when its compute and its channel are busy."""

    def __init__(self, plan: Plan, rank: int, backward: bool) -> None:
        self.layout = BatchLayout(plan, rank, (plan.seq_len,))
        self.rounds = self.layout.exchange(CAUSAL).rounds
        own = self.layout.own_group_segments
        pairs = [visible_pairs(own, own, CAUSAL)] + [
            sum(visible_pairs(own, a.segments, CAUSAL) for a in step.arrivals)
            for step in self.layout.rounds(CAUSAL)
        ]
        own_work, *self.work = [count / sum(pairs) for count in pairs]
        heads = self.layout.share.num_kv_heads
        shares = own_shares(self.rounds, self.layout, heads) if backward else [heads, heads]
        shares += [heads] * (len(self.rounds) + 2 - len(shares))
        parts = [(b - a) / heads * own_work for a, b in zip([0, *shares], shares, strict=False)]
        self.first, *self.during, self.last = parts[: len(self.rounds) + 2]
        self.computed = self.first
        self.sent = 0.0
        self.free = {"keys": [0.0, 0.0], "returns": [0.0, 0.0]}


def finish_time(plan: Plan, busiest_port: float, *, backward: bool) -> float:
    """Return when the last rank is done with a causal forward or backward.

    Args:
        plan: one replica of groups of one rank.
        busiest_port: how long the transfers of the busiest sender or receiver take in all.
        backward: keys travel once and partial gradients, in twice the bytes, back.
    """
    ranks = {share.rank: _Rank(plan, share.rank, backward) for share in plan.shares}
    num_rounds = len(ranks[0].rounds)
    rows = max(_rows(rank.rounds, end) for rank in ranks.values() for end in (0, 1))
    pace = busiest_port / rows / (3 if backward else 1)
    arrived = [{} for _ in range(num_rounds)]  # type: list[dict[int, float]]
    returned = [{} for _ in range(num_rounds)]  # type: list[dict[int, float]]

    def keys(b: int) -> None:
        if b < num_rounds:
            begins = {
                number: rank.free["keys"].pop(0) if rank.rounds[b].arrivals else 0.0
                for number, rank in ranks.items()
            }
            arrived[b] = _travel(ranks, b, begins, pace, back=False)

    keys(0)
    keys(1)
    for b in range(num_rounds):
        begins = {}
        for number, rank in ranks.items():
            rank.computed = max(rank.computed, arrived[b][number]) + rank.work[b]
            begins[number] = rank.computed if rank.rounds[b].arrivals else 0.0
            if rank.rounds[b].arrivals:
                rank.free["keys"].append(rank.computed)
            if backward and rank.rounds[b].departures:
                begins[number] = max(begins[number], rank.free["returns"].pop(0))
        if backward:
            returned[b] = _travel(ranks, b, begins, 2 * pace, back=True)
        keys(b + 2)
        for number, rank in ranks.items():
            rank.computed += rank.during[b]
            if backward and b:
                _add(rank, b - 1, returned[b - 1][number])
    for number, rank in ranks.items():
        rank.computed += rank.last
        if backward:
            _add(rank, num_rounds - 1, returned[-1][number])
    return max(rank.computed for rank in ranks.values())


def _add(rank: _Rank, b: int, returned: float) -> None:
    rank.computed = max(rank.computed, returned)
    if rank.rounds[b].departures:
        rank.free["returns"].append(rank.computed)


def _travel(
    ranks: dict[int, _Rank], b: int, begins: dict[int, float], pace: float, *, back: bool
) -> dict[int, float]:
    """Let all transfers of a round travel; return when each rank's are over."""
    ready = {number: max(rank.sent, begins[number]) for number, rank in ranks.items()}
    items = {
        n: [*_items(rank.rounds[b], 0), *_items(rank.rounds[b], 1)] for n, rank in ranks.items()
    }
    for number, rank in ranks.items():
        if items[number]:
            ends = {end for item in items[number] for end in (item.sender, item.receiver)}
            load = max(sum(x.num_rows for x in _items(rank.rounds[b], end)) for end in (0, 1))
            rank.sent = max(ready[end] for end in ends) + load * pace
    return {number: rank.sent if items[number] else 0.0 for number, rank in ranks.items()}


def _items(round_: PlacedRound, end: int) -> list[Transfer]:
    return [placed.item for placed in (round_.arrivals if end else round_.departures)]


def _rows(rounds: Sequence[PlacedRound], end: int) -> int:
    return sum(item.num_rows for round_ in rounds for item in _items(round_, end))
