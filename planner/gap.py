"""Where the gap between a layout's step and the lower bound comes from: parts that add up to it.

For group g let `alone` be the seconds of a step if its tokens and heads could be cut as finely as
one likes and transfers took no time; `computed` the same for its whole tokens and heads; `flowing`
with transfers that have no latency and whose first and last chunk are endlessly small; and `all`
what the cost model says. Means over groups are weighted by speed, tokens over `alone`, so that
tokens which moved from one group to another, to make up for its transfers, change no mean.

    grouping       mean alone - the bound's computing: mixed groups, and GPUs left idle
    rounding       mean (computed - alone), and the slowest group's `all` above the mean:
                   whole tokens, heads and sequences
    start-up       mean (all - flowing), and FSDP's exposed transfers of passes above the fewest
    communication  what is left: all-to-alls, the exchange where attention does not hide it, and
                   FSDP, less the transfers in the bound
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hexiseq_triton.planner.bound import Bound, unit_seconds
from hexiseq_triton.planner.cost import Cost, evaluate
from hexiseq_triton.planner.fsdp import boundary_seconds
from hexiseq_triton.planner.problem import Problem
from hexiseq_triton.planner.rates import Floats


def gap_parts(cost: Cost, bound: Bound) -> dict[str, float]:
    """Return the gap's parts as shares of the bound; they add up to step / bound - 1."""
    alone = _alone_seconds(cost)
    computed = _group_seconds(cost, computing_only=True)
    everything = _group_seconds(cost)
    flowing = _group_seconds(evaluate(without_start_up(cost.problem), cost.layout))
    weights = np.divide(cost.rows.group_tokens, alone, out=np.zeros_like(alone), where=alone > 0)

    def mean(seconds: Floats) -> float:
        return float(np.average(seconds, weights=weights))

    passes = cost.layout.accumulation
    exposed = boundary_seconds(cost.problem)
    slowest = passes * (
        cost.problem.model.layers * sum(float(d.max()) for d in cost.directions)
        + float(cost.logits_seconds.max())
    )
    parts = {
        "grouping": mean(alone) - bound.computing,
        "rounding": mean(computed - alone) + slowest - mean(everything),
        "start-up": mean(everything - flowing) + (passes - bound.passes) * exposed,
    }
    parts["communication"] = cost.step_seconds - bound.seconds - sum(parts.values())
    return {name: float(seconds / bound.seconds) for name, seconds in parts.items()}


def without_start_up(problem: Problem) -> Problem:
    """Return the problem with links of no latency, and chunks of a single token."""
    devices = tuple(
        replace(device, in_node_latency_us=0.0, across_latency_us=0.0)
        for device in problem.cluster.devices
    )
    return replace(
        problem,
        cluster=replace(problem.cluster, devices=devices),
        exchange=replace(problem.exchange, chunk_tokens=1),
    )


def _alone_seconds(cost: Cost) -> Floats:
    """Return each group's step if it were one GPU with the rates of all its ranks together."""
    forward, backward, logits = unit_seconds(cost.problem)
    layers, rank, starts = cost.problem.model.layers, cost.rows.rank, cost.rows.group_starts
    per_token = layers * (forward[0] + backward[0]) + logits
    per_pair = layers * (forward[1] + backward[1])
    one_pass = cost.rows.group_tokens / np.add.reduceat(1 / per_token[rank], starts)
    one_pass = one_pass + _pairs(cost) / np.add.reduceat(1 / per_pair[rank], starts)
    result: Floats = cost.layout.accumulation * one_pass
    return result


def _pairs(cost: Cost) -> Floats:
    """Return each group's (query, key) pairs in one pass."""
    problem = cost.problem
    work = cost.forward.attention * problem.rates.attention_forward[cost.rows.rank]
    of_a_pair = problem.work.attention_per_pair * problem.model.heads
    result: Floats = np.add.reduceat(work, cost.rows.group_starts) / of_a_pair
    return result


def _group_seconds(cost: Cost, computing_only: bool = False) -> Floats:
    """Return each group's seconds in one step, without waiting for other groups."""
    rows = cost.rows
    forward, backward = (
        rows.most(layer.token_wise) + rows.most(layer.attention)
        if computing_only
        else layer.group_seconds(rows)
        for layer in (cost.forward, cost.backward)
    )
    again = 2 if cost.problem.workload.recompute == "full" else 1
    layers = cost.problem.model.layers * (again * forward + backward)
    result: Floats = cost.layout.accumulation * (layers + rows.most(cost.logits_seconds))
    return result
