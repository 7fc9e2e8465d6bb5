"""What a shape needs at least, in seconds and in memory, from a few sums."""

from __future__ import annotations

import numpy as np

from hexiseq_triton.planner.fsdp import boundary_seconds, optimizer_seconds
from hexiseq_triton.planner.grids import Ranks, Shape
from hexiseq_triton.planner.heads import kv_heads_of
from hexiseq_triton.planner.memory import memory_model
from hexiseq_triton.planner.problem import Problem
from hexiseq_triton.planner.rates import Floats
from hexiseq_triton.planner.traffic import BF16


def least_seconds(problem: Problem, shape: Shape, ranks: Ranks) -> float:
    """Return seconds that the evaluator's cannot fall below for this shape.

    Counted are computing, what the all-to-alls send, and keys and values that cross nodes, all at
    their best order of ranks.
    """
    tokens = problem.workload.step_tokens / (shape.accumulation * len(ranks))
    layer = tokens * _computing(problem, shape, list(ranks))
    most = int(np.bincount(problem.rates.node[list(ranks)]).max())
    if shape.exchange in ("routes", "rotation") and not shape.proportional:
        layer = np.maximum(layer, tokens * _fetching(problem, shape, ranks, most))
    layer = layer + tokens * _shuffling(problem, shape, list(ranks), most)
    again = 2 if problem.workload.recompute == "full" else 1
    one_pass = problem.model.layers * (again * layer[0] + layer[1]) + boundary_seconds(problem)
    return float(shape.accumulation * one_pass + optimizer_seconds(problem).max())


def _computing(problem: Problem, shape: Shape, ranks: list[int]) -> Floats:
    """Return [forward, backward] seconds for each token of an average rank."""
    token_wise, attention = (seconds[:, ranks] for seconds in problem.seconds_per_token)
    attention = problem.model.heads * attention
    spread_token_wise, spread_attention = (
        len(ranks) / (1 / seconds).sum(axis=1) for seconds in (token_wise, attention)
    )
    if shape.proportional:
        result: Floats = spread_token_wise + spread_attention
    elif shape.arrangement == "contiguous":  # ranks see unequal numbers of keys
        result = np.maximum(token_wise.max(axis=1), spread_attention)
    else:
        result = (token_wise + attention).max(axis=1)
    return result


def _fetching(problem: Problem, shape: Shape, ranks: Ranks, most_in_node: int) -> Floats:
    """Return [forward, backward] seconds to fetch, for each token of an average rank.

    The outermost group fetches all other tokens, but for those of groups in its node, and answers
    in backward with twice the bytes.
    """
    model = problem.model
    head_first = most_in_node + shape.hp - 1
    in_node = most_in_node * shape.hp if shape.context_first else head_first
    far = max(0, shape.cp * shape.hp - in_node)
    num_bytes = far * 2 * BF16 * model.head_dim * max(1.0, model.kv_heads / shape.hp)
    seconds = num_bytes / problem.rates.across[list(ranks)].max()
    return np.array([seconds, 2 * seconds])


def _shuffling(problem: Problem, shape: Shape, ranks: list[int], most_in_node: int) -> float:
    """Return seconds to send q, k, v and o by all-to-all, for each token of an average rank."""
    model, rates = problem.model, problem.rates
    num_bytes = 2 * BF16 * model.head_dim * (model.heads + model.kv_heads)
    across = rates.across_all_to_all[ranks]
    through_both = (1 - 1 / shape.hp) / float((rates.in_node[ranks] + across).max())
    far = (1 - min(most_in_node / shape.hp, 1.0)) / float(across.max())
    return num_bytes * max(through_both, far)


def excess_of(problem: Problem, shape: Shape, ranks: Ranks) -> float:
    """Return the largest share of its limit that a rank with average tokens needs."""
    memory, model = memory_model(problem), problem.model
    heads, q_per_kv = model.heads // shape.hp, model.heads // model.kv_heads
    held = (kv_heads_of((at, at + heads), q_per_kv) for at in range(0, model.heads, heads))
    kv_heads = max(stop - start for start, stop in held)
    tokens = problem.workload.step_tokens / (shape.accumulation * len(ranks))
    group_tokens = shape.hp * tokens
    used = memory.fixed + tokens * memory.per_token
    used += group_tokens * (heads * memory.per_q_head + kv_heads * memory.per_kv_head)
    if shape.cp > 1:
        buffers = memory.buffers(shape.exchange, group_tokens, shape.cp * group_tokens)
        used += kv_heads * float(buffers)
    limits = problem.rates.memory_limit
    idle = max(memory.fixed, memory.floor)
    return float(max(used / limits[list(ranks)].min(), idle / limits.min()))
