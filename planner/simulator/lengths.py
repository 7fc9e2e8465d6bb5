"""The same plan at other lengths: every rank keeps its share of the tokens and its heads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hexiseq_triton.planner.cost import Cost, evaluate
from hexiseq_triton.planner.problem import Replica


def at_length(cost: Cost, seq_len: int) -> Cost:
    """Return what a layout costs with sequences of another length, of one document each."""
    problem = cost.problem
    workload = replace(problem.workload, seq_len=seq_len, documents=None)
    replicas = tuple(_scaled(replica, seq_len) for replica in cost.layout.replicas)
    return evaluate(replace(problem, workload=workload), replace(cost.layout, replicas=replicas))


def powers_around(seq_len: int, times: int = 8) -> list[int]:
    """Return lengths from a `times`-th of `seq_len` to `times` as much, each twice the last."""
    smallest = max(1, seq_len // times)
    return [smallest * 2**i for i in range(2 * times.bit_length() - 1)]


def _scaled(replica: Replica, seq_len: int) -> Replica:
    """Deal a replica's tokens anew in the same proportions, to the whole token."""
    tokens = np.array([count for group in replica.groups for count in group.tokens], dtype=float)
    total = replica.sequences * seq_len
    edges = np.rint(np.cumsum(tokens) / tokens.sum() * total).astype(int)
    dealt = iter(np.diff(edges, prepend=0).tolist())
    groups = (
        replace(group, tokens=tuple(next(dealt) for _ in group.tokens)) for group in replica.groups
    )
    return replace(replica, groups=tuple(groups))
