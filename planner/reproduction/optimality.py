"""The planner, coordinate descent and the MIP's proof, against all layouts of a grid.

The grid has every grouping of a few ranks into one replica in every nesting order, tokens in
sixteenths of the sequence on any rank, and heads in eighths of all on any rank of a group. The
search places tokens in blocks and single heads, so it may be faster than the best of the grid.
The cost model judges: in its terms CBC proves that no other split of the groups is faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations, product

import numpy as np

from hexiseq_triton.planner.certify import certify
from hexiseq_triton.planner.cost import Cost, evaluate, side_by_side
from hexiseq_triton.planner.descent import descended
from hexiseq_triton.planner.groupings import FEW_RANKS, groupings
from hexiseq_triton.planner.problem import Group, Layout, Problem, Replica
from hexiseq_triton.planner.rates import Floats, Ints
from hexiseq_triton.planner.reproduction.cells import Cell
from hexiseq_triton.planner.reproduction.rows import Row
from hexiseq_triton.planner.rows import Rows
from hexiseq_triton.planner.search import Search
from hexiseq_triton.planner.sight import fluid_sight
from hexiseq_triton.planner.stages import Splitter
from hexiseq_triton.planner.warm_up import warm_up

TOKEN_PARTS, HEAD_PARTS = 16, 8
_AT_ONCE = 1 << 15
"""Layouts evaluated side by side."""
_BEST_KEPT = 100
"""Of each grouping; the first that fits in memory counts."""


def against_all(cell: Cell) -> list[Row]:
    """Return a row for the search and one for coordinate descent."""
    warm_up()
    problem = cell.problem
    searched = Search(problem).best()
    worst = max(certificate.gap for certificate in certify(searched))
    methods = {
        "search": (searched, {"certified_gap": worst}),
        "descent, tokens by speed": (descended(problem, 1.0), {}),
        "descent, by its square root": (descended(problem, 0.5), {}),
    }
    best = best_of_grid(problem) if problem.cluster.world_size <= FEW_RANKS else None
    return [_row(cell, name, cost, best, notes) for name, (cost, notes) in methods.items()]


def _row(cell: Cell, name: str, cost: Cost, best: Cost | None, notes: dict[str, float]) -> Row:
    tokens = cell.problem.workload.step_tokens
    return Row(
        f"{cell.experiment}: {name}",
        cell.model,
        cell.seq_len,
        None,
        tokens / cost.step_seconds if cost.fits else None,
        baseline_any=None if best is None else f"all layouts of a grid: {best.layout.name}",
        speedup_any=None if best is None else best.step_seconds / cost.step_seconds,
        notes={"layout": cost.layout.name, **notes},
    )


# -------------------------------------------------------------------- the grid


def best_of_grid(problem: Problem, head_parts: int = HEAD_PARTS) -> Cost | None:
    """Return the fastest layout of the grid that fits in memory, for a batch of one sequence.

    Args:
        problem: with a few GPUs; its tokens and heads divide into the grid's parts.
        head_parts: the grid's parts of all heads.
    """
    found: list[tuple[float, Layout]] = []
    for groups in _groupings(problem):
        tokens, heads = _choices(problem, [len(ranks) for ranks in groups], head_parts)
        seconds = np.concatenate(
            [
                _seconds(problem, groups, tokens[at : at + _AT_ONCE], heads[at : at + _AT_ONCE])
                for at in range(0, len(tokens), _AT_ONCE)
            ]
        )
        for at in np.argsort(seconds, kind="stable")[:_BEST_KEPT].tolist():
            found.append((float(seconds[at]), _layout(groups, tokens[at], heads[at])))
    found.sort(key=lambda entry: entry[0])
    costs = (evaluate(problem, layout) for _, layout in found)
    return next((cost for cost in costs if cost.fits), None)


def _groupings(problem: Problem) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield every grouping in every order, one of those that only swap alike ranks."""
    splitter = Splitter(problem)
    nodes = list(problem.cluster.ranks_by_node.values())
    seen = set()
    for grouping in groupings(nodes, splitter.alone, splitter.kind, problem.model.heads):
        for order in permutations(grouping):
            make = tuple(tuple((splitter.kind[r], splitter.node[r]) for r in g) for g in order)
            if make not in seen:
                seen.add(make)
                yield order


def _choices(problem: Problem, sizes: Sequence[int], head_parts: int) -> tuple[Ints, Ints]:
    """Return tokens and heads of every choice, [choices, ranks]."""
    of_tokens = compositions(TOKEN_PARTS, sum(sizes)) * (problem.workload.seq_len // TOKEN_PARTS)
    by_group = [compositions(head_parts, size) for size in sizes]
    of_heads = np.array([np.concatenate(each) for each in product(*by_group)])
    of_heads = of_heads * (problem.model.heads // head_parts)
    tokens = np.repeat(of_tokens, len(of_heads), axis=0)
    heads = np.tile(of_heads, (len(of_tokens), 1))
    starts: Ints = np.cumsum(sizes, dtype=np.int64) - np.array(sizes)
    none_empty = (np.add.reduceat(tokens, starts, axis=1) > 0).all(axis=1)
    return tokens[none_empty], heads[none_empty]


def compositions(total: int, count: int) -> Ints:
    """Return all ways to write `total` as a sum of `count` numbers from 0, [ways, count]."""
    if count == 1:
        return np.array([[total]])
    parts = [
        np.insert(compositions(total - first, count - 1), 0, first, axis=1)
        for first in range(total + 1)
    ]
    return np.concatenate(parts)


def _seconds(
    problem: Problem, groups: Sequence[Sequence[int]], tokens: Ints, heads: Ints
) -> Floats:
    """Return the step of every choice, in one pass."""
    count = len(tokens)
    ranks = np.array([rank for group in groups for rank in group])
    rows = Rows.from_arrays(
        problem,
        rank=np.tile(ranks, count),
        tokens=tokens.ravel(),
        heads=heads.ravel(),
        sizes=np.tile([len(group) for group in groups], count),
        replica=np.repeat(np.arange(count), len(groups)),
    )
    ones = np.ones(count, dtype=np.int64)
    sight = fluid_sight(problem, rows, ones, "balanced")
    return side_by_side(problem, rows, sight, "routes", replicas=ones, passes=ones)


def _layout(groups: Sequence[tuple[int, ...]], tokens: Ints, heads: Ints) -> Layout:
    ends = np.cumsum([len(ranks) for ranks in groups])
    made = [
        Group(
            ranks,
            tuple(tokens[end - len(ranks) : end].tolist()),
            tuple(heads[end - len(ranks) : end].tolist()),
        )
        for ranks, end in zip(groups, ends.tolist(), strict=True)
    ]
    name = f"groups of {', '.join(str(len(ranks)) for ranks in groups)}"
    return Layout(name, (Replica(tuple(made), 1),), 1)
