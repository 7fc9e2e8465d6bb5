"""The cut bound: rows that must enter the GPUs, or the nodes, of any layout.

Cut the GPUs into cells: single GPUs, or nodes. Take a number of keys c, at most half a sequence,
and let t be the tokens of a pass that a cell holds, t' those of them in groups in which some token
sees more than c keys. G query heads share a KV head. In a layer, for each KV head of each cell,

    either the cell computes one of its query heads for such a group. More than c rows of K and of V
    are needed and at most t are at home: 2 (c - t) rows enter the cell;
    or all G are computed elsewhere for all t' tokens. Their rows of q enter another cell, and their
    rows of o this one: 2 G t' rows.

No row is counted twice, and for any s <= G both are 2 s t' at least, if t <= c / (1 + s). All t'
together are at least the tokens that see more than c keys. So either all these rows go through the
cells' ports, in each forward and each backward, or some cell holds more than c / (1 + s) tokens of
a pass, and its token-wise work alone takes its time. The step takes at least the shorter of the
two, at the best c and s.
"""

from __future__ import annotations

import math

import numpy as np

from hexiseq_triton.planner.densities import tokens_above
from hexiseq_triton.planner.memory import FIXED, PER_TOKEN, memory_model
from hexiseq_triton.planner.problem import Problem
from hexiseq_triton.planner.rates import Floats, Ints

_KEYS = 0.5 * 2.0 ** (-np.arange(20) / 2)
"""Shares of a sequence that are tried for c."""
_HEADS = 2.0 ** -np.arange(8)
"""Shares of G that are tried for s."""


def cut_seconds(problem: Problem, passes: int, per_token: Floats) -> float:
    """Return the bound for one step.

    Args:
        problem: whose step.
        passes: the fewest passes a step can have.
        per_token: seconds of token-wise work that one token costs in a step, on each rank.
    """
    rates = problem.rates
    out = np.maximum(rates.across, rates.across_all_to_all)
    gpus = np.arange(problem.cluster.world_size)
    return max(
        _seconds(problem, passes, per_token, gpus, rates.in_node + out),
        _seconds(problem, passes, per_token, rates.node, out),
    )


def _seconds(problem: Problem, passes: int, per_token: Floats, cells: Ints, ports: Floats) -> float:
    """Return the bound for one way to cut; `cells`, and `ports` in bytes/s, are of each rank."""
    workload, model, memory = problem.workload, problem.model, memory_model(problem)
    rate = np.bincount(cells, 1 / per_token)
    if len(rate) == 1:  # nothing need enter the only cell
        return 0.0
    limit = problem.rates.memory_limit[:, None] - memory.moments[:, FIXED]
    each = memory.moments[:, PER_TOKEN]
    tokens = (limit[:, each > 0] / each[each > 0]).min(axis=1)
    room = np.bincount(cells, np.maximum(tokens, 0.0))

    keys = workload.seq_len * _KEYS[:, None]
    heads = model.heads / model.kv_heads * _HEADS
    held = keys / (1 + heads)
    fastest = np.where(room > held[:, :, None], rate, 0.0).max(axis=2)
    holding = np.divide(passes * held, fastest, out=np.full_like(held, math.inf), where=fastest > 0)

    times = 3 if workload.recompute == "full" else 2
    row_bytes = 2 * model.head_dim * model.kv_heads * model.layers
    above = workload.global_batch * tokens_above(workload, keys)
    entering = times * row_bytes * 2 * heads * above / ports.sum()
    return float(np.minimum(holding, entering).max())
