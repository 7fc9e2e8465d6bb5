"""A quick estimate of a grouping, for choosing what the evaluator looks at, and where it starts.

In the balanced arrangement a group of L tokens, in a replica of N, takes about

    linear L + max(forward L, fetch_forward F) + max(backward L, fetch_backward F),   F = s (N - L)

where `linear` holds the token-wise phases and the all-to-alls, and F are the tokens whose keys and
values it fetches: s is 3/4 under a causal mask, what the nesting order gives on average, else 1.
The most tokens that end by T are found for each group, and by bisection the T by which all tokens
are done. Terms that fall as L grows make a group's time convex in L, with its minimum at a kink:
below it a group takes nothing at all.

In contiguous runs under a causal mask, a group fetches the tokens before it in its sequence, and a
token's work grows with its place. Then the groups, in order, each take what ends by T.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numba
import numpy as np

from hexiseq_triton.planner.group_time import Members, kv_heads_held, shuffle_seconds
from hexiseq_triton.planner.inner import first_split
from hexiseq_triton.planner.problem import Arrangement
from hexiseq_triton.planner.rates import Floats
from hexiseq_triton.planner.speeds import (
    ATTENTION_BACKWARD,
    ATTENTION_FORWARD,
    EXCHANGE_ACROSS,
    FORWARDS,
    HEAD_DIM,
    IN_NODE,
    LINEAR_BACKWARD,
    LINEAR_FORWARD,
    Q_PER_KV,
)
from hexiseq_triton.planner.stages import Ranks, Splitter
from hexiseq_triton.planner.traffic import BF16, FLOAT32

LINEAR, FORWARD, BACKWARD, NEAR, FAR = range(5)
"""Entries of a group's rates: seconds a token, and seconds a fetched token, by port."""
_STEPS = 30
_CLOSE, _FINE = 1e-4, 1e-6
"""How closely seconds, and shares of all tokens, are found."""
_WIDER = 1.25
_CAUSAL = 0.75
"""Share of the other groups' tokens that a causal group fetches, by nesting order on average."""


@dataclass
class Estimator:
    """Estimates groupings; the rates of a group are taken once for each make."""

    splitter: Splitter
    _rates: dict[object, Floats] = field(default_factory=dict)

    def rates(self, ranks: Ranks, num_tokens: int) -> Floats:
        """Return a group's rates, with heads and tokens placed for their own phases alone."""
        make = self.splitter.make(ranks)
        if make not in self._rates:
            unit = self.splitter.unit
            members = self.splitter.members(ranks, alone=True)
            self._rates[make] = group_rates(max(num_tokens, unit), unit, members)
        return self._rates[make]

    def estimated(
        self, grouping: Sequence[Ranks], num_tokens: int, arrangement: Arrangement
    ) -> tuple[float, tuple[float, ...]]:
        """Return about what one layer of a replica takes, both ways, and the groups' tokens.

        Args:
            grouping: ranks of each group; in contiguous runs, in this order.
            num_tokens: of the replica, in one pass.
            arrangement: of the tokens.
        """
        rates = np.array([self.rates(ranks, num_tokens // len(grouping)) for ranks in grouping])
        fetch = self._fetch(grouping, rates)
        phases = rates[:, : BACKWARD + 1].copy()
        if arrangement == "balanced":
            seconds, tokens = layer_seconds(num_tokens, phases, fetch)
        else:
            seq_len = self.splitter.problem.workload.seq_len
            seconds, tokens = contiguous_seconds(num_tokens, seq_len, phases, fetch / _CAUSAL)
        return float(seconds), tuple(tokens.tolist())

    def _fetch(self, grouping: Sequence[Ranks], rates: Floats) -> Floats:
        """Return [groups, 2]: seconds a token of other groups costs, forward and backward.

        Groups on the same nodes reach each other inside them, all others across.
        """
        if len(grouping) == 1:
            return np.zeros((1, 2))
        node = self.splitter.node
        places = [tuple(sorted({node[r] for r in ranks})) for ranks in grouping]
        share = 1 / rates[:, : BACKWARD + 1].sum(axis=1)
        share = share / share.sum()
        together: Counter[tuple[int, ...]] = Counter()
        for place, part in zip(places, share.tolist(), strict=True):
            together[place] += part
        here = np.array([together[place] for place in places])
        near = (here - share) / np.maximum(1e-12, 1 - share)
        moving = np.maximum(near * rates[:, NEAR], (1 - near) * rates[:, FAR])
        return self._both_ways(moving)

    def fetch_alone(self, rates: Floats, near: float) -> Floats:
        """Return [2], as above, of one group with a share `near` of the others' tokens near it."""
        moving = max(near * rates[NEAR], (1 - near) * rates[FAR])
        result: Floats = self._both_ways(np.array([moving]))[0]
        return result

    def _both_ways(self, moving: Floats) -> Floats:
        """Return [.., 2]: forward as often as it runs; backward fetches, and returns gradients."""
        seen = _CAUSAL if self.splitter.problem.workload.causal else 1.0
        seconds = seen * moving
        times = self.splitter.speeds.shared[FORWARDS]
        return np.stack([times * seconds, (1 + FLOAT32 / BF16) * seconds], axis=-1)


@numba.njit(cache=True)
def group_rates(num_tokens: int, unit: int, members: Members) -> Floats:
    """Return a group's rates, in the order of the names above."""
    by_rank, shared = members.by_rank, members.shared
    tokens, heads = first_split(num_tokens, unit, members)
    held = kv_heads_held(heads, int(shared[Q_PER_KV]))
    forward, backward = 0.0, 0.0
    rates = np.zeros(5)
    for r in range(len(tokens)):
        forward = max(forward, tokens[r] * by_rank[r, LINEAR_FORWARD])
        backward = max(backward, tokens[r] * by_rank[r, LINEAR_BACKWARD])
        rates[FORWARD] = max(rates[FORWARD], heads[r] * by_rank[r, ATTENTION_FORWARD])
        rates[BACKWARD] = max(rates[BACKWARD], heads[r] * by_rank[r, ATTENTION_BACKWARD])
        width = 2 * BF16 * shared[HEAD_DIM] * held[r]
        rates[NEAR] = max(rates[NEAR], width * by_rank[r, IN_NODE])
        rates[FAR] = max(rates[FAR], width * by_rank[r, EXCHANGE_ACROSS])
    seconds = forward + backward
    if len(tokens) > 1:
        shuffle, shuffle_back = shuffle_seconds(tokens, heads, held, members)
        seconds += shared[FORWARDS] * shuffle + shuffle_back
    rates[LINEAR] = seconds / num_tokens
    return rates


@numba.njit(cache=True)
def group_tokens(seconds: float, total: float, rates: Floats, fetch: Floats) -> float:
    """Return the most tokens of one group that end within `seconds`; 0 if none do.

    A group's time is convex in its tokens: it is least at one of its kinks, and rises from there.
    """
    high = min(total, seconds / rates.sum())
    if group_layer_seconds(high, total, rates, fetch) <= seconds:
        return float(high)
    low = 0.0
    for phase in range(2):
        kink = min(high, total * fetch[phase] / (rates[FORWARD + phase] + fetch[phase]))
        if group_layer_seconds(kink, total, rates, fetch) < group_layer_seconds(
            low, total, rates, fetch
        ):
            low = kink
    if group_layer_seconds(low, total, rates, fetch) > seconds:
        return 0.0
    while high - low > _FINE * total:
        middle = (low + high) / 2
        if group_layer_seconds(middle, total, rates, fetch) <= seconds:
            low = middle
        else:
            high = middle
    return low


@numba.njit(cache=True)
def group_layer_seconds(tokens: float, total: float, rates: Floats, fetch: Floats) -> float:
    """Return what a group's layer takes."""
    others = total - tokens
    forward = max(rates[FORWARD] * tokens, fetch[0] * others)
    backward = max(rates[BACKWARD] * tokens, fetch[1] * others)
    return float(rates[LINEAR] * tokens + forward + backward)


@numba.njit(cache=True)
def layer_seconds(num_tokens: int, rates: Floats, fetch: Floats) -> tuple[float, Floats]:
    """Return the least time in which the groups together finish `num_tokens`, and their tokens."""
    total = float(num_tokens)
    low, high = _bracket(total, rates, fetch)
    tokens = np.zeros(len(rates))
    for _ in range(_STEPS):
        middle = (low + high) / 2
        for g in range(len(rates)):
            tokens[g] = group_tokens(middle, total, rates[g], fetch[g])
        if tokens.sum() >= num_tokens:
            high = middle
        else:
            low = middle
        if high <= low * (1 + _CLOSE):
            break
    for g in range(len(rates)):
        tokens[g] = group_tokens(high, total, rates[g], fetch[g])
    return high, tokens * (total / tokens.sum())


@numba.njit(cache=True)
def _bracket(total: float, rates: Floats, fetch: Floats) -> tuple[float, float]:
    """Return a time that cannot suffice, communication left out, and one that does."""
    speed, slowest = 0.0, 0.0
    for g in range(len(rates)):
        speed += 1 / rates[g].sum()
        slowest = max(slowest, rates[g].sum() + fetch[g].sum())
    return total / speed, 2 * total * slowest


@numba.njit(cache=True)
def contiguous_seconds(
    num_tokens: int, seq_len: int, rates: Floats, fetch: Floats
) -> tuple[float, Floats]:
    """Return the same for contiguous runs, the groups in their order."""
    low, _ = _bracket(float(num_tokens), rates, fetch)
    low, high = 0.0, low
    while not _all_run(_runs(high, num_tokens, seq_len, rates, fetch), num_tokens):
        low, high = high, _WIDER * high
    while high > low * (1 + _CLOSE):
        middle = (low + high) / 2
        if _all_run(_runs(middle, num_tokens, seq_len, rates, fetch), num_tokens):
            high = middle
        else:
            low = middle
    return high, _runs(high, num_tokens, seq_len, rates, fetch)


@numba.njit(cache=True)
def _all_run(tokens: Floats, num_tokens: int) -> bool:
    return bool(tokens.sum() >= num_tokens * (1 - _FINE))


@numba.njit(cache=True)
def _runs(seconds: float, num_tokens: int, seq_len: int, rates: Floats, fetch: Floats) -> Floats:
    """Return the run of each group that ends within `seconds`, one after the other."""
    tokens = np.zeros(len(rates))
    before = 0.0
    for g in range(len(rates)):
        low, high = 0.0, num_tokens - before
        if _run_seconds(before, high, seq_len, rates[g], fetch[g]) <= seconds:
            low = high
        while high - low > _FINE * num_tokens:
            middle = (low + high) / 2
            if _run_seconds(before, middle, seq_len, rates[g], fetch[g]) <= seconds:
                low = middle
            else:
                high = middle
        tokens[g] = low
        before += low
    return tokens


@numba.njit(cache=True)
def _run_seconds(before: float, tokens: float, seq_len: int, rates: Floats, fetch: Floats) -> float:
    """Return what a run takes that begins after `before` tokens."""
    pairs = _pairs_before(before + tokens, seq_len) - _pairs_before(before, seq_len)
    work = pairs / ((seq_len + 1) / 2)
    fetched = before % seq_len
    forward = max(rates[FORWARD] * work, fetch[0] * fetched)
    backward = max(rates[BACKWARD] * work, fetch[1] * fetched)
    return float(rates[LINEAR] * tokens + forward + backward)


@numba.njit(cache=True)
def _pairs_before(position: float, seq_len: int) -> float:
    """Return the causal pairs of all tokens of the stream before a position."""
    whole = position // seq_len
    rest = position - whole * seq_len
    return float((whole * seq_len * (seq_len + 1) + rest * (rest + 1)) / 2)
