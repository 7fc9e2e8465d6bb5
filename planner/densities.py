"""How many keys the tokens of a sequence see, by few points that stand for all tokens.

Under a causal mask the tokens of a document of n tokens see 1 ... n keys; without one all see n.
The sum over the points of weight * f(pairs) equals the sum of f over all tokens where f is
straight, and falls short of it where f is concave: between two points it follows their chord.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from hexiseq_triton.planner.rates import Floats
from hexiseq_triton.planner.workload import Workload

_POINTS = 65


@dataclass(frozen=True)
class Densities:
    """Keys that tokens see, and how many tokens of one sequence each point stands for."""

    pairs: Floats
    tokens: Floats


def densities(workload: Workload) -> Densities:
    """Return the densities of one sequence; `tokens` add up to its length."""
    lengths = Counter(workload.document_lengths)
    if not workload.causal:
        count = np.array([float(n * times) for n, times in lengths.items()])
        return Densities(np.array([float(n) for n in lengths]), count)
    points, weights = [], []
    for length, times in lengths.items():
        point = np.unique(np.linspace(1, length, _POINTS).round())
        points.append(point)
        weights.append(times * _chord_weights(point))
    return Densities(np.concatenate(points), np.concatenate(weights))


def _chord_weights(points: Floats) -> Floats:
    """Return weights that sum a piecewise straight function over all whole numbers in between."""
    weights = np.zeros(len(points))
    weights[0] = 1.0
    steps = np.diff(points)
    # the numbers after a point, up to and with the next: k/steps of the way for k = 1 ... steps
    weights[1:] += (steps + 1) / 2
    weights[:-1] += (steps - 1) / 2
    return weights


def tokens_above(workload: Workload, pairs: Floats) -> Floats:
    """Return how many tokens of one sequence see more than `pairs` keys, for each entry."""
    result: Floats = np.zeros_like(pairs)
    for length, times in Counter(workload.document_lengths).items():
        seen = length - np.floor(pairs) if workload.causal else length * (pairs < length)
        result += times * np.maximum(seen, 0.0)
    return result
