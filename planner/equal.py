"""Equal splits without divisibility: every rank the same tokens and heads, within one.

Replicas take nodes in turn, and groups are pieces of nodes; where sizes don't divide, the last
piece of a node is smaller.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np

from hexiseq_triton.planner.cost import Cost, evaluate, side_by_side
from hexiseq_triton.planner.grids import Ranks, divisors
from hexiseq_triton.planner.partition import apportion
from hexiseq_triton.planner.problem import Group, Layout, Problem, Replica
from hexiseq_triton.planner.rows import Rows
from hexiseq_triton.planner.sight import fluid_sight


def best_equal_splits(problem: Problem) -> list[Cost]:
    """Return the costs of the equal splits by rising time, up to the first that fits."""
    layouts = list(equal_splits(problem))
    replicas = [replica for layout in layouts for replica in layout.replicas]
    rows = Rows.of(problem, Layout("", tuple(replicas), 1))
    sequences = np.array([replica.sequences for replica in replicas])
    seconds = side_by_side(
        problem,
        rows,
        fluid_sight(problem, rows, sequences, "balanced"),
        "routes",
        replicas=np.array([len(layout.replicas) for layout in layouts]),
        passes=np.array([layout.accumulation for layout in layouts]),
    )
    costs: list[Cost] = []
    for index in np.argsort(seconds, kind="stable"):
        costs.append(evaluate(problem, layouts[index]))
        if costs[-1].fits:
            break
    return costs


def equal_splits(problem: Problem) -> Iterator[Layout]:
    """Yield the equal splits for all replicas and passes, and for groups of 1, 2, 4, ... ranks."""
    workload = problem.workload
    nodes = list(problem.cluster.ranks_by_node.values())
    largest = max(len(node) for node in nodes)
    sizes = {min(1 << exponent, largest) for exponent in range(largest.bit_length() + 1)}
    for accumulation in workload.accumulations:
        sequences = workload.global_batch // accumulation
        for count in divisors(sequences):
            if count > len(nodes):
                break
            for size in sorted(sizes):
                replicas = tuple(
                    _replica(problem, nodes[first::count], size, sequences // count)
                    for first in range(count)
                )
                name = f"groups of {size}" + (f" in {count} replicas" if count > 1 else "")
                yield Layout(name, replicas, accumulation)


def _replica(problem: Problem, nodes: list[Ranks], size: int, sequences: int) -> Replica:
    """Return the nodes cut into groups of at most `size` ranks."""
    pieces = [node[start : start + size] for node in nodes for start in range(0, len(node), size)]
    ranks = sum(len(piece) for piece in pieces)
    tokens = iter(apportion(sequences * problem.workload.seq_len, [1] * ranks))
    return Replica(
        tuple(
            Group(
                piece,
                tuple(next(tokens) for _ in piece),
                _equal_heads(problem.model.heads, len(piece)),
            )
            for piece in pieces
        ),
        sequences,
    )


@cache
def _equal_heads(heads: int, ranks: int) -> tuple[int, ...]:
    return tuple(apportion(heads, [1] * ranks))
