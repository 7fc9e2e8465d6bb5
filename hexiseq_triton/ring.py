"""Attention of one HP group over the keys of all groups: own keys first, then the arriving ones.

Forward carries (o, lse) through every launch. Backward fetches the keys again and sends each
chunk's dK/dV straight back to its owner, one round at a time, so that sums run in the order of the
schedule on every run. Own keys cover what is under way: in the forward all of them while the first
keys come. In the backward some heads of them do that, some are done in rounds in which nothing
arrives, and the last while the last partials go home.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import torch

from hexiseq_triton.exchange import MessageRoutes, Returns
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
from hexiseq_triton.launches import Launch, own_turns
from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.peer_routes import PeerReturns, PeerRoutes
from hexiseq_triton.planner.heads import HeadRange
from hexiseq_triton.rounds import PlacedRound
from hexiseq_triton.timeline import Timeline


class _Gradients(NamedTuple):
    """What every backward launch reads and adds to."""

    q: torch.Tensor
    do: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor
    dq: torch.Tensor
    deterministic: bool


class Ring:
    """One attention call of one rank.

    Args:
        routes: how keys and gradients travel between groups.
        layout: who holds what.
        kv: this rank's keys and values after the all-to-all.
        like: a tensor of their dtype and head dimension.
        options: mask, scale and softcap.
        timeline: where spans are recorded.
        wire: the dtype in which partial dK/dV travel in the backward; None in the forward.
        sm_margin: multiprocessors to leave to the exchange while it is under way.

    The exchange starts at once.
    """

    def __init__(
        self,
        routes: MessageRoutes | PeerRoutes,
        layout: BatchLayout,
        kv: KV,
        like: torch.Tensor,
        options: AttentionOptions,
        timeline: Timeline,
        *,
        wire: torch.dtype | None = None,
        sm_margin: int = 0,
    ) -> None:
        self._routes = routes
        self._layout = layout
        self._exchange = layout.exchange(options.mask)
        self._kv = kv
        self._options = options
        self._timeline = timeline
        self._sm_margin = sm_margin
        self._wire = wire
        self._arrivals = routes.arrivals(layout, options.mask, kv, like, wire)

    @property
    def exchanges(self) -> bool:
        """Whether keys come or go: gradients of keys are then sums over ranks."""
        return bool(self._exchange.rounds)

    def forward(
        self, q: torch.Tensor, out: torch.Tensor, sink: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Write the output of q [L_g, h_d, D] to `out`, alike; return lse [h_d, L_g].

        lse is in the state dtype. So is `sink` [h_d], which counts in the output and not in lse.
        """
        state = state_dtype(q.dtype)
        lse = torch.empty(q.shape[1], q.shape[0], dtype=state, device=q.device)
        last = self._last_rounds()
        alone = not any(last.values())  # nothing arrives: no state to carry
        o = None if alone else torch.empty(q.shape, dtype=state, device=q.device)
        for round_ in (None, *self._exchange.rounds):
            in_flight = not alone and round_ is not self._exchange.rounds[-1]
            for launch in self._own() if round_ is None else self._arrived(round_):
                heads, is_last = launch.q_heads, last[launch.interval] is round_
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
                        first=round_ is None,
                        out=out[:, heads] if is_last else None,
                        sink=sink[heads] if is_last and sink is not None else None,
                        sm_margin=self._sm_margin if in_flight else 0,
                    )
            if round_:
                self._arrivals.release(round_)
        return lse

    def _last_rounds(self) -> dict[HeadRange, PlacedRound | None]:
        """Return the round in which each interval's last keys arrive; None for its own keys."""
        last: dict[HeadRange, PlacedRound | None] = dict.fromkeys(self._kv)
        for round_ in self._exchange.rounds:
            last |= dict.fromkeys(round_.launches, round_)
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
    ) -> torch.Tensor:
        """Return dq [L_g, h_d, D] in the state dtype, and write the gradients of this rank's kv.

        Args:
            q, do: queries and gradient of the output, [L_g, h_d, D].
            lse, delta: as the kernels take them, [h_d, L_g]; lse has the sink in.
            dkv: room for the gradients, as kv; in the state dtype if the ring `exchanges`.
            deterministic: repeat bit for bit.
        """
        dq = torch.empty(q.shape, dtype=lse.dtype, device=q.device)
        gradients = _Gradients(q, do, lse, delta, dq, deterministic)
        launches = self._own()
        if not self.exchanges:
            for launch in launches:
                self._run_backward(launch, gradients, dkv[launch.interval], accumulate=False)
            return dq
        turns = own_turns(self._exchange.rounds, self._layout, launches)
        for launch in chain(*turns.during, turns.last):  # which find something to add to
            dq[:, launch.q_heads] = 0.0
            dkv[launch.interval][:, :, launch.kv_heads] = 0.0
        for launch in turns.first:
            self._run_backward(launch, gradients, dkv[launch.interval], accumulate=False)
        assert self._wire is not None
        returns = self._routes.returns(self._layout, self._options.mask, q, lse.dtype, self._wire)
        for round_, own in zip(self._exchange.rounds, turns.during, strict=True):
            for launch in self._arrived(round_):
                partial = returns.partials[launch.interval]
                partial[slice(*round_.half[launch.interval])] = 0.0
                self._run_backward(launch, gradients, partial, accumulate=True)
            returns.start(round_)
            self._arrivals.release(round_)
            for launch in own:
                self._run_backward(launch, gradients, dkv[launch.interval], accumulate=True)
            if returns.in_flight > 1:  # the next round takes the pool half of the one before
                self._add_returned(dkv, returns)
        for launch in turns.last:
            self._run_backward(launch, gradients, dkv[launch.interval], accumulate=True)
        self._add_returned(dkv, returns)
        return dq

    def _run_backward(
        self, launch: Launch, gradients: _Gradients, dkv: torch.Tensor, *, accumulate: bool
    ) -> None:
        heads = launch.q_heads
        with self._timeline.span("attention backward"):
            attention_backward(
                gradients.q[:, heads],
                launch.kv[:, 0],
                launch.kv[:, 1],
                gradients.do[:, heads],
                gradients.lse[heads],
                gradients.delta[heads],
                gradients.dq[:, heads],
                dkv[:, 0, launch.kv_heads],
                dkv[:, 1, launch.kv_heads],
                self._layout.own_group_segments,
                launch.segments,
                launch.heads,
                self._options,
                accumulate=accumulate,
                deterministic=gradients.deterministic,
                sm_margin=self._sm_margin if self.exchanges else 0,
            )

    def _add_returned(self, dkv: KV, returns: Returns | PeerReturns) -> None:
        with self._timeline.span("wait for gradients"):
            round_ = returns.wait()
        for interval, pieces in round_.returns.items():
            add_partials(dkv[interval], returns.returned[interval], pieces)
        returns.release(round_)

    # ---------------------------------------------------------------- launches

    def _own(self) -> list[Launch]:
        segments = self._layout.own_group_segments
        return [self._launch(interval, kv, segments) for interval, kv in self._kv.items()]

    def _arrived(self, round_: PlacedRound) -> list[Launch]:
        """Wait for a round, and return what is to be launched on it."""
        with self._timeline.span("wait for keys"):
            self._arrivals.wait()
        return [
            self._launch(interval, self._arrivals.pools[interval], segments)
            for interval, segments in round_.launches.items()
        ]

    def _launch(self, interval: HeadRange, kv: torch.Tensor, segments: Segments) -> Launch:
        """Find the local query heads that read the KV heads of `interval`."""
        start, stop = self._layout.share.q_heads
        per_kv = self._layout.plan.q_per_kv
        first, last = max(start, interval[0] * per_kv), min(stop, interval[1] * per_kv)
        q_heads = slice(first - start, last - start)
        kv_heads = slice(0, interval[1] - interval[0])
        return Launch(interval, kv, segments, q_heads, kv_heads, HeadMap(first, per_kv))
