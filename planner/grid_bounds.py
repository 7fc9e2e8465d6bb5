"""What shapes need at least, in seconds and in memory, from a few sums.

Shapes that are bounded together have one arrangement and one exchange, and are all proportional or
none is. Arrays run over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hexiseq_triton.planner.exchange import ANSWER
from hexiseq_triton.planner.fsdp import boundary_seconds, optimizer_seconds
from hexiseq_triton.planner.grids import Ranks, Shape
from hexiseq_triton.planner.heads import kv_heads_of
from hexiseq_triton.planner.memory import memory_model
from hexiseq_triton.planner.problem import Problem
from hexiseq_triton.planner.rates import Floats, Ints
from hexiseq_triton.planner.traffic import BF16


@dataclass(frozen=True)
class _Sizes:
    """Numbers of some shapes, and most ranks of one node."""

    accumulation: Ints
    cp: Ints
    hp: Ints
    context_first: NDArray[np.bool_]
    in_node: int

    @classmethod
    def of(cls, problem: Problem, shapes: Sequence[Shape], ranks: Ranks) -> _Sizes:
        names = ("accumulation", "cp", "hp", "context_first")
        accumulation, cp, hp, context_first = (
            np.array([getattr(shape, name) for shape in shapes]) for name in names
        )
        in_node = int(np.bincount(problem.rates.node[list(ranks)]).max())
        return cls(accumulation, cp, hp, context_first, in_node)


def least_seconds(problem: Problem, shapes: Sequence[Shape], ranks: Ranks) -> Floats:
    """Return seconds that the evaluator's cannot fall below for each shape.

    Counted are computing, what the all-to-alls send, and keys and values that cross nodes, all at
    their best order of ranks.
    """
    sizes, first = _Sizes.of(problem, shapes, ranks), shapes[0]
    tokens = problem.workload.step_tokens / (sizes.accumulation * len(ranks))
    layer = tokens * _computing(problem, first, list(ranks))[:, None]
    if not first.proportional:
        moving = _ring_rows(sizes, first) if first.exchange != "routes" else _far_rows(sizes)
        token_wise = problem.seconds_per_token[0][:, list(ranks)].min(axis=1)
        num_bytes = 2 * BF16 * problem.model.head_dim
        fetching = num_bytes * np.maximum(1.0, problem.model.kv_heads / sizes.hp) * moving
        fetching = fetching / problem.rates.across[list(ranks)].max() * np.array([[1], [ANSWER]])
        layer = np.maximum(layer, tokens * (token_wise[:, None] + fetching))
    layer = layer + tokens * _shuffling(problem, sizes, list(ranks))
    again = 2 if problem.workload.recompute == "full" else 1
    one_pass = problem.model.layers * (again * layer[0] + layer[1]) + boundary_seconds(problem)
    result: Floats = sizes.accumulation * one_pass + optimizer_seconds(problem).max()
    return result


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


def _far_rows(sizes: _Sizes) -> Floats:
    """Return rows that cross nodes to a rank, for each token of an average rank.

    The outermost group fetches all other tokens, but for those of groups in its node, and answers
    in backward with twice the bytes.
    """
    in_node = np.where(sizes.context_first, sizes.in_node * sizes.hp, sizes.in_node + sizes.hp - 1)
    result: Floats = np.maximum(0.0, sizes.cp * sizes.hp - in_node)
    return result


def _ring_rows(sizes: _Sizes, shape: Shape) -> Floats:
    """Return rows that cross nodes one after the other, for each token of an average rank.

    The longest run of groups whose hops can all stay inside nodes has `near` of them. In one ring
    that is longer, every hop waits for one across nodes. Of two nested rings, either the outer one
    does, which has no fewer hops than there are such runs, or the inner one, and then at least
    every second hop.
    """
    if shape.exchange == "all_gather":
        return np.zeros(len(sizes.cp))
    near = (sizes.in_node + sizes.hp - 1) // sizes.hp
    near = np.where(sizes.context_first, sizes.in_node, near)
    hops = sizes.cp - 1.0
    if shape.exchange == "double_ring":
        hops = np.minimum(sizes.cp / near - 1, sizes.cp / 2)
    result: Floats = np.where(sizes.cp > near, hops * sizes.hp, 0.0)
    return result


def _shuffling(problem: Problem, sizes: _Sizes, ranks: list[int]) -> Floats:
    """Return seconds to send q, k, v and o by all-to-all, for each token of an average rank."""
    model, rates = problem.model, problem.rates
    num_bytes = 2 * BF16 * model.head_dim * (model.heads + model.kv_heads)
    across = rates.across_all_to_all[ranks]
    through_both = (1 - 1 / sizes.hp) / float((rates.in_node[ranks] + across).max())
    far = (1 - np.minimum(sizes.in_node / sizes.hp, 1.0)) / float(across.max())
    result: Floats = num_bytes * np.maximum(through_both, far)
    return result


def excesses(problem: Problem, shapes: Sequence[Shape], ranks: Ranks) -> Floats:
    """Return the largest share of its limit that a rank with average tokens needs in each shape."""
    memory, model, sizes = memory_model(problem), problem.model, _Sizes.of(problem, shapes, ranks)
    heads = model.heads // sizes.hp
    held = {int(hp): _most_kv_heads(model.heads, model.kv_heads, int(hp)) for hp in set(sizes.hp)}
    kv_heads = np.array([held[int(hp)] for hp in sizes.hp])
    tokens = problem.workload.step_tokens / (sizes.accumulation * len(ranks))
    group_tokens = sizes.hp * tokens
    fixed, token, q_head, kv_head, buffered = memory.moments.T[:, :, None]
    buffers = memory.buffers(shapes[0].exchange, group_tokens, sizes.cp * group_tokens)
    used = fixed + tokens * token + group_tokens * (heads * q_head + kv_heads * kv_head)
    used = used + buffered * np.where(sizes.cp > 1, kv_heads * buffers, 0.0)
    beside = np.where(sizes.cp > 1, memory.communicator, 0.0)
    beside = beside + np.where(sizes.hp > 1, memory.communicator, 0.0)
    limits = problem.rates.memory_limit
    needed = (used.max(axis=0) + beside) / limits[list(ranks)].min()
    result: Floats = np.maximum(needed, memory.idle / limits.min())
    return result


def _most_kv_heads(num_heads: int, num_kv_heads: int, hp: int) -> int:
    """Return the most KV heads that a rank of `hp` with equal query heads reads."""
    heads = num_heads // hp
    held = (
        kv_heads_of((at, at + heads), num_heads // num_kv_heads)
        for at in range(0, num_heads, heads)
    )
    return max(stop - start for start, stop in held)
