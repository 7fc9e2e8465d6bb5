"""Attention of one HP group over the keys of all groups: own keys first, then the arriving ones.

The loop over the batches of the exchange is the same forward and backward. Forward carries (o, lse)
through every launch. Backward fetches the keys again and sends each chunk's dK/dV straight back to
its owner, one round at a time, so that sums run in the order of the schedule on every run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hexiseq_triton.batches import Batch, PoolRows, Step
from hexiseq_triton.channel import Channel, Pending
from hexiseq_triton.heads import KV
from hexiseq_triton.kernels import (
    AttentionOptions,
    HeadMap,
    attention_backward,
    attention_forward,
    state_dtype,
)
from hexiseq_triton.kernels.options import Segments
from hexiseq_triton.kernels.partials import add_partials
from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.planner.heads import HeadRange
from hexiseq_triton.segments import RowRange
from hexiseq_triton.timeline import Timeline


@dataclass(frozen=True)
class _Launch:
    """Keys and values of one head interval, and the local query heads that read them."""

    interval: HeadRange
    kv: torch.Tensor
    segments: Segments
    q_heads: slice
    heads: HeadMap


class Ring:
    """One attention call of one rank.

    Args:
        channel: the ranks of the replica.
        layout: who holds what.
        kv: this rank's keys and values after the all-to-all.
        options: mask, scale and softcap.
        timeline: where spans are recorded.
    """

    def __init__(
        self,
        channel: Channel,
        layout: BatchLayout,
        kv: KV,
        options: AttentionOptions,
        timeline: Timeline,
    ) -> None:
        self._channel = channel
        self._layout = layout
        self._exchange = layout.exchange(options.mask)
        self._kv = kv
        self._options = options
        self._timeline = timeline

    def forward(
        self, q: torch.Tensor, sink: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output [L_g, h_d, D] of q, alike, and lse [h_d, L_g] in the state dtype.

        `sink` [h_d] in the state dtype counts in the output and not in lse.
        """
        state = state_dtype(q.dtype)
        lse = torch.empty(q.shape[1], q.shape[0], dtype=state, device=q.device)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        last = self._last_batches()
        alone = all(batch is None for batch in last.values())  # nothing arrives: no state to carry
        o = None if alone else torch.empty(q.shape, dtype=state, device=q.device)
        for batch, launches in self._walk(q):
            for launch in launches:
                heads, is_last = launch.q_heads, last[launch.interval] is batch
                with self._timeline.span("attention"):
                    attention_forward(
                        q[:, heads],
                        launch.kv[:, 0],
                        launch.kv[:, 1],
                        None if o is None else o[:, heads],
                        lse[heads],
                        self._layout.own_group_segments,
                        launch.segments,
                        launch.heads,
                        self._options,
                        first=batch is None,
                        out=out[:, heads] if is_last else None,
                        sink=sink[heads] if is_last and sink is not None else None,
                    )
        return out, lse

    def _last_batches(self) -> dict[HeadRange, Batch | None]:
        """Return the batch in which each interval's last keys arrive; None for its own keys."""
        last: dict[HeadRange, Batch | None] = dict.fromkeys(self._kv)
        for batch in self._exchange.batches:
            last |= dict.fromkeys(batch.arrivals, batch)
        return last

    def backward(
        self,
        q: torch.Tensor,
        do: torch.Tensor,
        lse: torch.Tensor,
        delta: torch.Tensor,
        dkv: KV,
        *,
        deterministic: bool = False,
        reduce_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return dq [L_g, h_d, D] in the state dtype, and write the gradients of this rank's kv.

        Args:
            q, do: queries and gradient of the output, [L_g, h_d, D].
            lse, delta: as the kernels take them, [h_d, L_g]; lse has the sink in.
            dkv: room for the gradients, as kv in the state dtype.
            deterministic: repeat bit for bit.
            reduce_dtype: in which partial dK/dV travel; None is the state dtype.
        """
        wire = reduce_dtype or lse.dtype
        dq = torch.empty(q.shape, dtype=lse.dtype, device=q.device)
        partials = _pools(self._exchange.arrival_rows, q, lse.dtype)
        returned = _pools(self._exchange.return_rows, q, wire)
        returning: deque[tuple[Batch, list[Pending]]] = deque()
        for batch, launches in self._walk(q):
            for launch in launches:
                own = batch is None
                grads = dkv[launch.interval] if own else partials[launch.interval]
                if batch:
                    grads[slice(*batch.half[launch.interval])] = 0.0
                with self._timeline.span("attention backward"):
                    attention_backward(
                        q[:, launch.q_heads],
                        launch.kv[:, 0],
                        launch.kv[:, 1],
                        do[:, launch.q_heads],
                        lse[launch.q_heads],
                        delta[launch.q_heads],
                        dq[:, launch.q_heads],
                        grads[:, 0],
                        grads[:, 1],
                        self._layout.own_group_segments,
                        launch.segments,
                        launch.heads,
                        self._options,
                        accumulate=not own,  # own keys come first, and write
                        deterministic=deterministic,
                    )
            if batch:
                started = [self._start_return(s, partials, returned, wire) for s in batch.steps]
                returning.append((batch, started))
            if len(returning) > 1:  # the next batch takes the pool half of the one before
                self._add_returned(dkv, returned, *returning.popleft())
        while returning:
            self._add_returned(dkv, returned, *returning.popleft())
        return dq

    # ---------------------------------------------------------------- the exchange

    def _walk(self, q: torch.Tensor) -> Iterator[tuple[Batch | None, list[_Launch]]]:
        """Yield the launches on this rank's own keys, then each batch with those on what arrived.

        One batch is in flight while the one before is worked on.
        """
        batches = self._exchange.batches
        pools = _pools(self._exchange.arrival_rows, q, q.dtype)
        in_flight = deque(self._start_batch(batch, pools) for batch in batches[:1])
        own = self._layout.own_group_segments
        yield None, [self._launch(interval, kv, own) for interval, kv in self._kv.items()]
        for i, batch in enumerate(batches):
            with self._timeline.span("wait for keys"):
                for pending in in_flight.popleft():
                    pending.wait()
            if i + 1 < len(batches):
                in_flight.append(self._start_batch(batches[i + 1], pools))
            yield (
                batch,
                [
                    self._launch(interval, pools[interval], segments)
                    for interval, segments in batch.arrivals.items()
                ],
            )

    def _launch(self, interval: HeadRange, kv: torch.Tensor, segments: Segments) -> _Launch:
        """Find the local query heads that read the KV heads of `interval`."""
        start, stop = self._layout.share.q_heads
        per_kv = self._layout.plan.q_per_kv
        first, last = max(start, interval[0] * per_kv), min(stop, interval[1] * per_kv)
        q_heads = slice(first - start, last - start)
        return _Launch(interval, kv, segments, q_heads, HeadMap(first, per_kv))

    def _start_batch(self, batch: Batch, pools: KV) -> list[Pending]:
        return [self._start_round(step, pools) for step in batch.steps]

    def _start_round(self, step: Step, pools: KV) -> Pending:
        sends, receives = [], []
        departure, arrival = step.round.departure, step.round.arrival
        if departure:
            sends = [(departure.receiver, _gathered(self._kv[departure.kv_heads], departure.rows))]
        if arrival:
            receives = [(arrival.sender, pools[arrival.kv_heads][slice(*step.arrival_rows)])]
        return self._channel.start(sends, receives, "the exchange of keys and values")

    def _start_return(self, step: Step, partials: KV, returned: KV, wire: torch.dtype) -> Pending:
        """Send the partial dK/dV of what arrived in a round back; receive those of what left."""
        sends, receives = [], []
        departure, arrival = step.round.departure, step.round.arrival
        if arrival:
            partial = partials[arrival.kv_heads][slice(*step.arrival_rows)]
            sends = [(arrival.sender, partial.to(wire))]
        if departure:
            receives = [
                (departure.receiver, returned[departure.kv_heads][slice(*step.return_rows)])
            ]
        return self._channel.start(sends, receives, "the return of key and value gradients")

    def _add_returned(self, dkv: KV, returned: KV, batch: Batch, pending: list[Pending]) -> None:
        with self._timeline.span("wait for gradients"):
            for transfer in pending:
                transfer.wait()
        for interval, pieces in batch.returns.items():
            add_partials(dkv[interval], returned[interval], pieces)


def _pools(rows: PoolRows, like: torch.Tensor, dtype: torch.dtype) -> KV:
    """Return a buffer [rows, 2, heads, D] for each interval."""
    return {
        (start, stop): like.new_empty(count, 2, stop - start, like.shape[-1], dtype=dtype)
        for (start, stop), count in rows.items()
    }


def _gathered(kv: torch.Tensor, rows: tuple[RowRange, ...]) -> torch.Tensor:
    """Return the given rows, one range after the other."""
    pieces = [kv[slice(*held)] for held in rows]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
