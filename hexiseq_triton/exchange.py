"""What one rank's attention exchanges with other groups: keys that arrive, gradients that return.

`Arrivals` and `Returns` move both as messages; `peer_routes` does it by memory that ranks share.

Both walk the rounds of a layout. On all ranks round r + 2 of the keys starts after the returns of
round r, so the two ends of every transfer agree, and whatever else a rank does is its own affair:
a round begins as soon as its room in the pools is free. So a rank that works on its own keys for
long serves the others meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from hexiseq_triton.channel import Channel, Mark, Message, Pending
from hexiseq_triton.heads import KV
from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.rounds import Exchange, PlacedRound, PoolRows
from hexiseq_triton.segments import Mask, RowRange

_MOST_MESSAGES = 4
"""Runs of rows that a transfer sends each as it stands; of more it sends a copy in one piece."""


class MessageRoutes:
    """How a rank exchanges with the others of its replica: by messages.

    Args:
        channel: the ranks of the replica.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def arrivals(
        self,
        layout: BatchLayout,
        mask: Mask,
        kv: KV,
        like: torch.Tensor,
        wire: torch.dtype | None,
    ) -> Arrivals:
        """Begin the exchange of a call: start what moves first.

        Args:
            layout: who holds what.
            mask: what a query sees.
            kv: this rank's keys and values.
            like: a tensor of their dtype and head dimension.
            wire: in which partial gradients travel; None if none will.
        """
        return Arrivals(self._channel, layout.exchange(mask), kv)

    def returns(
        self,
        layout: BatchLayout,
        mask: Mask,
        like: torch.Tensor,
        state: torch.dtype,
        wire: torch.dtype,
    ) -> Returns:
        """Begin the way back; `arrivals` of this call were told the same `wire`.

        Args:
            layout, mask, like, wire: as for `arrivals`.
            state: the dtype in which partials are computed.
        """
        return Returns(self._channel, layout.exchange(mask), like, state, wire)


class Halves:
    """When the halves of a pool are free: those used two rounds ago are taken next.

    Args:
        ready: from when on the pool may be written at all.
    """

    def __init__(self, ready: Mark) -> None:
        self._free = deque([ready, ready])

    def take(self) -> Mark:
        """Return from when on the next half may be written."""
        return self._free.popleft()

    def give_back(self, mark: Mark) -> None:
        """Let the half that was worked on until `mark` be taken again."""
        self._free.append(mark)


class Arrivals:
    """The keys and values of other groups: one round is worked on, the next is under way.

    Args:
        channel: the ranks of the replica.
        exchange: the rounds.
        kv: this rank's keys and values, from which the departures are taken.
    """

    def __init__(self, channel: Channel, exchange: Exchange, kv: KV) -> None:
        self._channel = channel
        self._rounds = deque(exchange.rounds)
        self._kv = kv
        like = next(iter(kv.values())) if kv else None
        self.pools: KV = {} if like is None else new_pools(exchange.arrival_rows, like, like.dtype)
        self._ready = channel.mark()
        self._halves = Halves(self._ready)
        self._in_flight: deque[Pending] = deque()
        self._start()
        self._start()

    def wait(self) -> None:
        """Wait for the next round."""
        self._in_flight.popleft().wait()

    def release(self, round_: PlacedRound) -> None:
        """Start the round after the next one, which may overwrite what was worked on until now."""
        if round_.arrivals:
            self._halves.give_back(self._channel.mark())
        self._start()

    def _start(self) -> None:
        if not self._rounds:
            return
        round_ = self._rounds.popleft()
        sends: list[Message] = []
        receives: list[Message] = []
        with self._channel.issuing(self._halves.take() if round_.arrivals else self._ready):
            for item, _ in round_.departures:
                sends += [(item.receiver, run) for run in _runs(self._kv[item.kv_heads], item.rows)]
            for item, rows in round_.arrivals:
                pool = self.pools[item.kv_heads][slice(*rows)]
                receives += [(item.sender, run) for run in _runs_of_pool(pool, item.rows)]
            what = "the exchange of keys and values"
            self._in_flight.append(self._channel.start(sends, receives, what))


class Returns:
    """Partial dK/dV: of the keys that arrived, on their way home, and of those that left, back.

    Args:
        channel: the ranks of the replica.
        exchange: the rounds.
        like: a tensor on the device, of the head dimension.
        state: the dtype in which partials are computed.
        wire: the dtype in which they travel.
    """

    def __init__(
        self,
        channel: Channel,
        exchange: Exchange,
        like: torch.Tensor,
        state: torch.dtype,
        wire: torch.dtype,
    ) -> None:
        self._channel = channel
        self._wire = wire
        self.partials = new_pools(exchange.arrival_rows, like, state)
        self.returned = new_pools(exchange.return_rows, like, wire)
        self._halves = Halves(channel.mark())
        self._started: deque[tuple[PlacedRound, Pending]] = deque()

    @property
    def in_flight(self) -> int:
        return len(self._started)

    def start(self, round_: PlacedRound) -> None:
        """Send the partials of a round, each to the owner of its rows; receive those of ours."""
        sends: list[Message] = []
        receives: list[Message] = []
        for item, rows in round_.arrivals:
            partial = self.partials[item.kv_heads][slice(*rows)]
            sends.append((item.sender, partial.to(self._wire)))
        for item, rows in round_.departures:
            receives.append((item.receiver, self.returned[item.kv_heads][slice(*rows)]))
        after = [self._halves.take()] if round_.departures else []
        after += [self._channel.mark()] if round_.arrivals else []
        with self._channel.issuing(*after):
            what = "the return of key and value gradients"
            self._started.append((round_, self._channel.start(sends, receives, what)))

    def wait(self) -> PlacedRound:
        """Wait for the oldest round that was started, and return it."""
        round_, pending = self._started.popleft()
        pending.wait()
        return round_

    def release(self, round_: PlacedRound) -> None:
        """Let what returned in a round be overwritten: it has been added until now."""
        if round_.departures:
            self._halves.give_back(self._channel.mark())


def new_pools(rows: PoolRows, like: torch.Tensor, dtype: torch.dtype) -> KV:
    """Return a buffer [rows, 2, heads, D] for each interval."""
    return {
        (start, stop): like.new_empty(count, 2, stop - start, like.shape[-1], dtype=dtype)
        for (start, stop), count in rows.items()
    }


def _runs(kv: torch.Tensor, rows: Sequence[RowRange]) -> list[torch.Tensor]:
    """Return the given rows as contiguous tensors to send."""
    runs = [kv[slice(*held)] for held in rows]
    return runs if len(runs) <= _MOST_MESSAGES else [torch.cat(runs)]


def _runs_of_pool(pool: torch.Tensor, rows: Sequence[RowRange]) -> list[torch.Tensor]:
    """Return where the tensors of `_runs` go, which the sender takes of the same rows."""
    if len(rows) > _MOST_MESSAGES:
        return [pool]
    return list(pool.split([stop - start for start, stop in rows]))
