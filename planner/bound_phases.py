"""The phases bound: all computing of a step, spread over the GPUs as well as their rates allow.

For group g of a layout, let A_g and B_g be the sums of its ranks' rates in token-wise work (tokens
per second) and in attention (pairs of all heads per second), L_g its tokens and P_g its pairs in a
step. Ranks keep their tokens and heads through all passes, layers and directions, so the step takes

    T >= L_g / A_g + P_g / B_g     for each g.

Price a GPU of rates (a, b) at a + z b, for any z >= 0, and let r = B_g / A_g, between the least and
the greatest b / a of the cluster. Then A_g + z B_g = (1 + z r) A_g, and with the line above

    T (A_g + z B_g) >= (1 + z r) (L_g + P_g / r) >= phi(L_g, P_g)

where phi takes the least value over all such r. As a least value of straight functions through 0,
phi is concave and homogeneous, so phi(L_g, P_g) >= sum of phi(1, pairs) over the group's tokens.
Summed over groups, and with GPUs added that no group uses,

    T >= sum over all tokens of phi(1, pairs)  /  sum over all GPUs of (a + z b).

The right side no longer knows the layout. It is taken at the best z found. Where all GPUs have the
same b / a, or all tokens see equally many keys, it is work over rate, summed over the phases.
"""

from __future__ import annotations

import numpy as np

from hexiseq_triton.planner.densities import Densities, densities
from hexiseq_triton.planner.problem import Problem
from hexiseq_triton.planner.rates import Floats

_PRICES = 65


def phases_seconds(problem: Problem, per_token: Floats, per_pair: Floats) -> float:
    """Return the bound for one step.

    Args:
        problem: whose step.
        per_token: seconds of token-wise work that one token costs, on each rank.
        per_pair: seconds of attention that one (query, key) pair of all heads costs, on each rank.
    """
    rates, attention_rates = 1 / per_token, 1 / per_pair
    ratios = attention_rates / rates
    least, most = float(ratios.min()), float(ratios.max())
    work = densities(problem.workload)
    total, attention_total = float(rates.sum()), float(attention_rates.sum())

    def bound(prices: Floats) -> Floats:
        paid = _least_price(prices, work, least, most)
        result: Floats = paid / (total + prices * attention_total)
        return result

    # beyond these prices all tokens take the same end of the range of ratios
    low = np.log(float(work.pairs.min()) / most**2)
    high = np.log(float(work.pairs.max()) / least**2)
    prices = np.exp(np.linspace(low, high, _PRICES))
    best = int(np.argmax(bound(prices)))
    low, high = np.log(prices[[max(best - 1, 0), min(best + 1, _PRICES - 1)]])
    finer = np.exp(np.linspace(low, high, _PRICES))
    return problem.workload.global_batch * float(bound(finer).max())


def _least_price(prices: Floats, work: Densities, least: float, most: float) -> Floats:
    """Return the sum of phi(1, pairs) over one sequence's tokens, for each price."""
    # (1 + z r) (1 + pairs / r) is least at r^2 = pairs / z
    ratio = np.clip(np.sqrt(work.pairs / prices[:, None]), least, most)
    phi = (1 + prices[:, None] * ratio) * (1 + work.pairs / ratio)
    result: Floats = phi @ work.tokens
    return result
