"""Attention of one HP group over the keys of all groups: own keys first, then the arriving ones.

The loop over the rounds of the exchange is the same forward and backward. Forward carries (o, lse)
through every chunk. Backward fetches the keys again and sends each chunk's dK/dV straight back to
its owner, one round at a time, so that sums run in the order of the schedule on every run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hexiseq_triton.channel import Channel, Pending
from hexiseq_triton.heads import KV
from hexiseq_triton.kernels import (
    AttentionOptions,
    HeadMap,
    attention_backward,
    attention_forward,
    state_dtype,
)
from hexiseq_triton.layout import BatchLayout, Round
from hexiseq_triton.planner.heads import HeadRange
from hexiseq_triton.segments import Segment
from hexiseq_triton.timeline import Timeline


@dataclass(frozen=True)
class _Chunk:
    """Keys and values of one head interval, and the local query heads that read them."""

    interval: HeadRange
    kv: torch.Tensor
    segments: Sequence[Segment]
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
        self._kv = kv
        self._options = options
        self._timeline = timeline

    def forward(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output [L_g, h_d, D] of q, alike, and lse [h_d, L_g] in the state dtype."""
        state = state_dtype(q.dtype)
        lse = torch.empty(q.shape[1], q.shape[0], dtype=state, device=q.device)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        last = self._last_steps()
        alone = all(step is None for step in last.values())  # nothing arrives: no state to carry
        o = None if alone else torch.empty(q.shape, dtype=state, device=q.device)
        for step, chunks in self._walk():
            for chunk in chunks:
                is_last = last[chunk.interval] is step
                with self._timeline.span("attention"):
                    attention_forward(
                        q[:, chunk.q_heads],
                        chunk.kv[:, 0],
                        chunk.kv[:, 1],
                        None if o is None else o[:, chunk.q_heads],
                        lse[chunk.q_heads],
                        self._layout.own_group_segments,
                        chunk.segments,
                        chunk.heads,
                        self._options,
                        first=step is None,
                        out=out[:, chunk.q_heads] if is_last else None,
                    )
        return out, lse

    def _last_steps(self) -> dict[HeadRange, Round | None]:
        """Return the round in which each interval's last chunk arrives; None for its own chunk."""
        last: dict[HeadRange, Round | None] = dict.fromkeys(self._kv)
        for step in self._layout.rounds(self._options.mask):
            if step.arrival:
                last[step.arrival.kv_heads] = step
        return last

    def backward(
        self, q: torch.Tensor, do: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor
    ) -> tuple[torch.Tensor, KV]:
        """Return dq [L_g, h_d, D] and the gradients of this rank's kv, in the state dtype."""
        dq = torch.empty(q.shape, dtype=lse.dtype, device=q.device)
        dkv = {interval: torch.empty_like(kv, dtype=lse.dtype) for interval, kv in self._kv.items()}
        returning: deque[tuple[Round, torch.Tensor | None, Pending]] = deque()
        for step, chunks in self._walk():
            partials = [] if step else list(dkv.values())
            for i, chunk in enumerate(chunks):
                if step:
                    partials.append(torch.zeros_like(chunk.kv, dtype=lse.dtype))
                with self._timeline.span("attention backward"):
                    attention_backward(
                        q[:, chunk.q_heads],
                        chunk.kv[:, 0],
                        chunk.kv[:, 1],
                        do[:, chunk.q_heads],
                        lse[chunk.q_heads],
                        delta[chunk.q_heads],
                        dq[:, chunk.q_heads],
                        partials[i][:, 0],
                        partials[i][:, 1],
                        self._layout.own_group_segments,
                        chunk.segments,
                        chunk.heads,
                        self._options,
                        accumulate=step is not None,  # own chunks come first, and write
                    )
            if step:
                returning.append(self._start_return(step, partials, lse.dtype))
            if len(returning) > 1:
                self._add_returned(dkv, *returning.popleft())
        while returning:
            self._add_returned(dkv, *returning.popleft())
        return dq, dkv

    # ---------------------------------------------------------------- the exchange

    def _walk(self) -> Iterator[tuple[Round | None, list[_Chunk]]]:
        """Yield this rank's own chunks, then each round with what arrived in it.

        Up to `window` rounds are in flight while the chunks before them are worked on.
        """
        rounds = self._layout.rounds(self._options.mask)
        window = self._layout.plan.exchange.window
        in_flight = deque(self._start_round(step) for step in rounds[:window])
        own = self._layout.own_group_segments
        yield None, [self._chunk(interval, kv, own) for interval, kv in self._kv.items()]
        for i, step in enumerate(rounds):
            arrived, pending = in_flight.popleft()
            with self._timeline.span("wait for keys"):
                pending.wait()
            if i + window < len(rounds):
                in_flight.append(self._start_round(rounds[i + window]))
            if step.arrival is None or arrived is None:
                yield step, []
            else:
                yield step, [self._chunk(step.arrival.kv_heads, arrived, step.arrival_segments)]

    def _chunk(self, interval: HeadRange, kv: torch.Tensor, segments: Sequence[Segment]) -> _Chunk:
        """Find the local query heads that read the KV heads of `interval`."""
        start, stop = self._layout.share.q_heads
        per_kv = self._layout.plan.q_per_kv
        first, last = max(start, interval[0] * per_kv), min(stop, interval[1] * per_kv)
        q_heads = slice(first - start, last - start)
        return _Chunk(interval, kv, segments, q_heads, HeadMap(first, per_kv))

    def _start_round(self, step: Round) -> tuple[torch.Tensor | None, Pending]:
        sends, receives, arrived = [], [], None
        if step.departure:
            kv = self._kv[step.departure.kv_heads]
            pieces = [kv[slice(*rows)] for rows in step.departure.rows]
            sends = [
                (step.departure.receiver, pieces[0] if len(pieces) == 1 else torch.cat(pieces))
            ]
        if step.arrival:
            heads = step.arrival.kv_heads
            arrived = self._like.new_empty(
                step.arrival.num_rows, 2, heads[1] - heads[0], self._like.shape[-1]
            )
            receives = [(step.arrival.sender, arrived)]
        return arrived, self._channel.start(sends, receives, "the exchange of keys and values")

    @property
    def _like(self) -> torch.Tensor:
        return next(iter(self._kv.values()))

    def _start_return(
        self, step: Round, partials: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> tuple[Round, torch.Tensor | None, Pending]:
        """Send the partial dK/dV of what arrived in a round back; receive those of what left."""
        sends, receives, returned = [], [], None
        if step.arrival:
            sends = [(step.arrival.sender, partials[0])]
        if step.departure:
            kv = self._kv[step.departure.kv_heads]
            returned = kv.new_empty(step.departure.num_rows, *kv.shape[1:], dtype=dtype)
            receives = [(step.departure.receiver, returned)]
        pending = self._channel.start(sends, receives, "the return of key and value gradients")
        return step, returned, pending

    def _add_returned(
        self, dkv: KV, step: Round, returned: torch.Tensor | None, pending: Pending
    ) -> None:
        with self._timeline.span("wait for gradients"):
            pending.wait()
        if step.departure is None or returned is None:
            return
        target = dkv[step.departure.kv_heads]
        at = 0
        for start, stop in step.departure.rows:
            target[start:stop] += returned[at : at + stop - start]
            at += stop - start
