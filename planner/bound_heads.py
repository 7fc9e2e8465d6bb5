"""The whole-heads bound: as the phases bound, but query heads of a group cannot be cut.

A composition m says how many ranks of each kind a group has. Let A_m be the sum of their rates in
token-wise work. H heads cannot be spread as finely as rates would ask for: with h_r heads on rank
r, attention on P pairs of all heads takes max h_r / H * P / b_r, at least P / B_m with

    B_m = H / level,   level = the least at which  sum over ranks of floor(level * b_r) >= H.

So a group of composition m takes T >= L / A_m + P / B_m. Price a GPU of kind k at p_k >= 0, so that
all GPUs together cost 1, and a group at p(m), the sum of its ranks' prices. Then

    T p(m) >= p(m) (L / A_m + P / B_m) >= sum over the group's tokens of w(pairs)
    w(pairs) = min over all compositions m of p(m) (1 / A_m + pairs / B_m)

and, summed over the groups, with GPUs added that no group uses, T >= sum over all tokens(w(pairs)).
As a least value of straight functions w is concave, so chords between few densities give no more.

The prices are those of a linear program, the dual of the choice of groups:

    maximise    sum_j tokens[j] w[j]
    subject to  w[j] <= p(m) (1 / A_m + pairs[j] / B_m)     for all m and densities j
                sum_k count[k] p[k] = 1,  p >= 0

python-mip solves it over few compositions, and those that are violated most are added. Whatever
prices it returns, the bound is what the formula above says of them, over all compositions.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from hexiseq_triton.planner.densities import densities
from hexiseq_triton.planner.problem import Problem
from hexiseq_triton.planner.rates import Floats, Ints

MOST_COMPOSITIONS = 1_500_000
_MOST_ROUNDS = 20
_CLOSE = 1e-5
"""Rounds end where the program promises no more than this share above what is proved."""


@dataclass(frozen=True)
class _Compositions:
    """All compositions: ranks of each kind, and seconds of a token and of a pair of all heads."""

    counts: Ints
    """[compositions, kinds]; those of one rank first, one a kind."""
    per_token: Floats
    per_pair: Floats


def whole_heads_seconds(problem: Problem, per_token: Floats, per_pair: Floats) -> float:
    """Return the bound for one step; 0 if there are more than `MOST_COMPOSITIONS`.

    Args:
        problem: whose step.
        per_token: seconds of token-wise work that one token costs, on each rank.
        per_pair: seconds of attention that one (query, key) pair of all heads costs, on each rank.
    """
    kinds, available = np.unique(
        np.stack([per_token, per_pair], axis=1), axis=0, return_counts=True
    )
    if prod(available + 1) > MOST_COMPOSITIONS:
        return 0.0
    rates, attention_rates = 1 / kinds.T
    every = _compositions(available, rates, attention_rates, problem.model.heads)
    work = densities(problem.workload)
    # seconds of a sequence on all GPUs as one fluid: what numbers are scaled to
    fluid = (
        work.tokens * (1 / (available @ rates) + work.pairs / (available @ attention_rates))
    ).sum()

    held = set(range(len(available)))
    best = 0.0
    for _ in range(_MOST_ROUNDS):
        prices, promised = _priced(every, sorted(held), available, work.pairs, work.tokens / fluid)
        least, binding = _cheapest(every, prices, work.pairs)
        best = max(best, float(work.tokens @ least))
        if promised * fluid <= best * (1 + _CLOSE) or held >= set(binding):
            break
        held |= set(binding)
    return problem.workload.global_batch * best


def _compositions(
    available: Ints, rates: Floats, attention_rates: Floats, heads: int
) -> _Compositions:
    grid = np.stack(np.meshgrid(*(np.arange(n + 1) for n in available), indexing="ij"), axis=-1)
    counts = grid.reshape(-1, len(available))[1:]  # without the empty one
    counts = counts[np.argsort(counts.sum(axis=1), kind="stable")]
    levels = np.unique(np.arange(1, heads + 1)[:, None] / attention_rates)
    room = np.floor(levels[:, None] * attention_rates * (1 + 1e-12)).astype(np.int64)
    # the least level at which all heads find room, by bisection; at the last one they do
    low = np.zeros(len(counts), dtype=np.int64)
    high = np.full(len(counts), len(levels) - 1)
    while (low < high).any():
        middle = (low + high) // 2
        fits = (counts * room[middle]).sum(axis=1) >= heads
        low, high = np.where(fits, low, middle + 1), np.where(fits, middle, high)
    return _Compositions(counts, 1 / (counts @ rates), levels[low] / heads)


def _cheapest(every: _Compositions, prices: Floats, pairs: Floats) -> tuple[Floats, list[int]]:
    """Return w of each density, and the composition that decides it."""
    cost = every.counts @ prices
    token, pair = cost * every.per_token, cost * every.per_pair
    binding = [int(np.argmin(token + seen * pair)) for seen in pairs]
    least: Floats = token[binding] + pairs * pair[binding]
    return least, binding


def _priced(
    every: _Compositions, held: list[int], available: Ints, pairs: Floats, weights: Floats
) -> tuple[Floats, float]:
    """Return the program's prices over some compositions, and its optimum."""
    from mip import CBC, INTEGER, MAXIMIZE, LinExpr, Model, xsum  # slow to import

    model = Model(sense=MAXIMIZE, solver_name=CBC)
    model.verbose = 0
    model.threads = 1
    total = float(available.sum())  # prices are scaled to a mean of 1
    prices = [model.add_var(f"price_{k}") for k in range(len(available))]
    shares = [model.add_var(f"share_{j}", obj=1.0) for j in range(len(pairs))]
    model.add_var("silence", var_type=INTEGER, ub=0)  # CBC prints its log of programs without one
    model += xsum(float(n) * p for n, p in zip(available, prices, strict=True)) == total
    for m in held:
        for j, share in enumerate(shares):
            seconds = every.per_token[m] + pairs[j] * every.per_pair[m]
            terms = (-weights[j] * seconds / total * every.counts[m]).tolist()
            model.add_constr(LinExpr([share, *prices], [1.0, *terms]) <= 0.0)
    model.optimize()
    found = np.maximum([float(price.x or 0.0) for price in prices], 0.0)
    return found / float(found @ available), float(model.objective_value)
