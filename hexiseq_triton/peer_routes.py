"""The exchange between groups by memory that the ranks of a host share, without messages.

Who needs something fetches it, by the GPU's copy engines: keys and values from the memory of the
rank that serves them, partial gradients from that of the rank that computed them. Copy engines need
no multiprocessor, so attention keeps all of them, where NCCL's kernels would take some or wait for
room. A fetch waits for the owner's count (`signals`); what was fetched is counted back, and only
then written over. Rounds, pools and sums are those of the messages: `Arrivals` and `Returns` of
`exchange` and these are used alike, and results have the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch

from hexiseq_triton.channel import Lane, Mark, wait_for
from hexiseq_triton.exchange import Halves, new_pools
from hexiseq_triton.heads import KV
from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.mapper import Mapper
from hexiseq_triton.peer_memory import open_peer_memory
from hexiseq_triton.peer_places import Places, Region
from hexiseq_triton.planner.heads import HeadRange
from hexiseq_triton.rounds import Exchange, PlacedRound
from hexiseq_triton.segments import Mask
from hexiseq_triton.signals import Count, Signals, counters_obstacle


class Memory(Protocol):
    """What is needed of `peer_memory.PeerMemory`."""

    @property
    def out(self) -> int: ...
    def reserve(self, in_bytes: int, out_bytes: int) -> None: ...
    def local(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor: ...
    def remote(
        self, peer: int, offset: int, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor: ...


class Counters(Protocol):
    """What is needed of `signals.Signals`."""

    def send(self, peer: int, what: Count, count: int) -> None: ...
    def wait(self, peer: int, what: Count, count: int) -> None: ...
    def close(self) -> None: ...


class PeerRoutes:
    """How this rank exchanges with the others of its replica, from call to call.

    Args:
        memory: that the replica's ranks share.
        signals: their counters.
        ranks: the plan's ranks, as the two number them.
        rank: this rank of the plan.
        device: its device.
    """

    def __init__(
        self,
        memory: Memory,
        signals: Counters,
        ranks: Sequence[int],
        rank: int,
        device: torch.device,
    ) -> None:
        self.memory, self._signals = memory, signals
        self.number = {rank: number for number, rank in enumerate(ranks)}
        self.rank = rank
        self.keys_lane, self.returns_lane = Lane(device), Lane(device)
        self._calls = self._rounds = 0
        self._takers: dict[int, int] = {}  # the last call in which a rank fetched this one's keys

    def arrivals(
        self,
        layout: BatchLayout,
        mask: Mask,
        kv: KV,
        like: torch.Tensor,
        wire: torch.dtype | None,
    ) -> PeerArrivals:
        """See `MessageRoutes.arrivals`."""
        places = layout.places(mask)
        line = 2 * like.shape[-1]
        partial_bytes = 0 if wire is None else places.partial_lines * line * wire.itemsize
        self.memory.reserve(places.key_lines * line * like.element_size(), partial_bytes)
        self._calls += 1
        return PeerArrivals(self, layout.exchange(mask), places, kv, like, self._calls)

    def returns(
        self,
        layout: BatchLayout,
        mask: Mask,
        like: torch.Tensor,
        state: torch.dtype,
        wire: torch.dtype,
    ) -> PeerReturns:
        """See `MessageRoutes.returns`."""
        exchange = layout.exchange(mask)
        first = self._rounds + 1
        self._rounds += len(exchange.rounds)
        return PeerReturns(self, exchange, layout.places(mask), like, state, wire, first)

    def close(self) -> None:
        """Stop looking after what is waited for."""
        self._signals.close()

    # ---------------------------------------------------------------- for those two

    def send(self, rank: int, what: Count, count: int) -> None:
        """See `Signals.send`, by the plan's ranks."""
        self._signals.send(self.number[rank], what, count)

    def wait(self, rank: int, what: Count, count: int) -> None:
        """See `Signals.wait`, by the plan's ranks."""
        self._signals.wait(self.number[rank], what, count)

    def wait_for_takers(self) -> None:
        """Let the current stream wait until nobody needs the keys of earlier calls."""
        for rank, call in self._takers.items():
            self.wait(rank, Count.KEYS_TAKEN, call)
        self._takers.clear()

    def offer(self, rank: int, call: int) -> None:
        """Let a rank fetch the keys that stand here now."""
        self.send(rank, Count.KEYS_READY, call)
        self._takers[rank] = call

    def keys(self, rank: int, region: Region, like: torch.Tensor) -> torch.Tensor:
        """Return the keys and values [rows, 2, heads, D] of one interval at a rank."""
        return self._view(rank, 0, region, like.shape[-1], like.dtype)

    def partials(self, rank: int, region: Region, head_dim: int, wire: torch.dtype) -> torch.Tensor:
        """Return the pool [rows, 2, heads, D] of partial gradients of one interval at a rank."""
        return self._view(rank, self.memory.out, region, head_dim, wire)

    def _view(
        self, rank: int, begin: int, region: Region, head_dim: int, dtype: torch.dtype
    ) -> torch.Tensor:
        offset = begin + region.start * 2 * head_dim * dtype.itemsize
        shape = region.rows, 2, region.heads, head_dim
        if rank == self.rank:
            return self.memory.local(offset, shape, dtype)
        return self.memory.remote(self.number[rank], offset, shape, dtype)


def open_peer_routes(
    mapper: Mapper, ranks: Sequence[int], rank: int, timeout: timedelta
) -> tuple[PeerRoutes | None, str]:
    """Return the exchange of a replica by shared memory, or None, and which path it takes.

    Args:
        mapper: of the replica's ranks.
        ranks: the plan's numbers of them.
        rank: this one's.
        timeout: how long a rank may wait for another.
    """
    memory, path = open_peer_memory(mapper, timeout, "the exchange of keys", counters_obstacle())
    if memory is None:
        return None, path
    signals = Signals(mapper, ranks, timeout)
    return PeerRoutes(memory, signals, ranks, rank, mapper.device), path


class PeerArrivals:
    """The keys and values of other groups; see `exchange.Arrivals`."""

    def __init__(
        self,
        routes: PeerRoutes,
        exchange: Exchange,
        places: Places,
        kv: KV,
        like: torch.Tensor,
        call: int,
    ) -> None:
        self._routes, self._places, self._like, self._call = routes, places, like, call
        self._rounds = deque(exchange.rounds)
        self._waited: set[int] = set()
        self._last_round_with = {
            item.sender: number
            for number, round_ in enumerate(exchange.rounds)
            for item, _ in round_.arrivals
        }  # the last round with something of a rank
        self._number = 0
        self.pools: KV = new_pools(exchange.arrival_rows, like, like.dtype)
        self._offer(exchange, kv)
        self._halves = Halves(routes.keys_lane.mark())
        self._in_flight: deque[Mark] = deque()
        self._start()
        self._start()

    def _offer(self, exchange: Exchange, kv: KV) -> None:
        """Lay this rank's keys out for those who fetch some."""
        leaving = [item for round_ in exchange.rounds for item, _ in round_.departures]
        self._routes.wait_for_takers()
        for interval in sorted({item.kv_heads for item in leaving}):
            region = self._places.keys[self._routes.rank][interval]
            self._routes.keys(self._routes.rank, region, self._like).copy_(kv[interval])
        for rank in sorted({item.receiver for item in leaving}):
            self._routes.offer(rank, self._call)

    def wait(self) -> None:
        """Wait for the next round."""
        wait_for(self._in_flight.popleft())

    def release(self, round_: PlacedRound) -> None:
        """Start the round after the next one, which may overwrite what was worked on until now."""
        if round_.arrivals:
            self._halves.give_back(self._routes.keys_lane.mark())
        self._start()

    def _start(self) -> None:
        if not self._rounds:
            return
        round_, routes, lane = self._rounds.popleft(), self._routes, self._routes.keys_lane
        senders = sorted({item.sender for item, _ in round_.arrivals})
        with lane.issuing(*([self._halves.take()] if round_.arrivals else [])):
            for rank in senders:
                if rank not in self._waited:
                    routes.wait(rank, Count.KEYS_READY, self._call)
                    self._waited.add(rank)
            for item, rows in round_.arrivals:
                region = self._places.keys[item.sender][item.kv_heads]
                theirs = routes.keys(item.sender, region, self._like)
                start = rows[0]
                for first, last in item.rows:
                    stop = start + last - first
                    self.pools[item.kv_heads][start:stop].copy_(theirs[first:last])
                    start = stop
            for rank in senders:
                if self._last_round_with[rank] == self._number:
                    routes.send(rank, Count.KEYS_TAKEN, self._call)
            self._in_flight.append(lane.mark())
        self._number += 1


class PeerReturns:
    """Partial dK/dV on their way home; see `exchange.Returns`.

    Args:
        routes: the way.
        exchange, places: the rounds, and what stands where at all ranks.
        like: a tensor on the device, of the head dimension.
        state: the dtype in which partials are computed.
        wire: the dtype in which they travel.
        first: the number of the first round, which no earlier one has.
    """

    def __init__(
        self,
        routes: PeerRoutes,
        exchange: Exchange,
        places: Places,
        like: torch.Tensor,
        state: torch.dtype,
        wire: torch.dtype,
        first: int,
    ) -> None:
        self._routes, self._places, self._wire = routes, places, wire
        self._head_dim = like.shape[-1]
        self._first, self._number = first, 0
        self._sent: KV = {
            interval: routes.partials(routes.rank, region, self._head_dim, wire)
            for interval, region in places.partials[routes.rank].items()
        }
        self.partials = self._sent
        if wire != state:
            self.partials = new_pools(exchange.arrival_rows, like, state)
        self.returned = new_pools(exchange.return_rows, like, wire)
        self._halves = Halves(routes.returns_lane.mark())
        self._started: deque[tuple[PlacedRound, int, Mark]] = deque()

    @property
    def in_flight(self) -> int:
        return len(self._started)

    def start(self, round_: PlacedRound) -> None:
        """Let the owners fetch the partials of a round; fetch those of this rank's keys."""
        routes, count = self._routes, self._first + self._number
        if self.partials is not self._sent:
            for interval, half in round_.half.items():
                self._sent[interval][slice(*half)].copy_(self.partials[interval][slice(*half)])
        for rank in _owners(round_):
            routes.send(rank, Count.PARTIALS_READY, count)
        others = sorted({item.receiver for item, _ in round_.departures})
        with routes.returns_lane.issuing(*([self._halves.take()] if round_.departures else [])):
            for rank in others:
                routes.wait(rank, Count.PARTIALS_READY, count)
            for item, rows in round_.departures:
                theirs = self._partial_of(item.receiver, item.kv_heads)
                there = self._places.arrived[self._number, item]
                self.returned[item.kv_heads][slice(*rows)].copy_(theirs[slice(*there)])
            for rank in others:
                routes.send(rank, Count.PARTIALS_TAKEN, count)
            self._started.append((round_, count, routes.returns_lane.mark()))
        self._number += 1

    def _partial_of(self, rank: int, interval: HeadRange) -> torch.Tensor:
        region = self._places.partials[rank][interval]
        return self._routes.partials(rank, region, self._head_dim, self._wire)

    def wait(self) -> PlacedRound:
        """Wait for the oldest round that was started, and return it."""
        round_, count, mark = self._started.popleft()
        wait_for(mark)
        for rank in _owners(round_):
            self._routes.wait(rank, Count.PARTIALS_TAKEN, count)
        return round_

    def release(self, round_: PlacedRound) -> None:
        """Let what returned in a round be overwritten: it has been added until now."""
        if round_.departures:
            self._halves.give_back(self._routes.returns_lane.mark())


def _owners(round_: PlacedRound) -> list[int]:
    """Return whose keys arrived in a round."""
    return sorted({item.sender for item, _ in round_.arrivals})
