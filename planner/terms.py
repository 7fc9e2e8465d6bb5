"""A step's predicted seconds, rank by rank: named parts that add up to the step on every rank."""

from __future__ import annotations

import numpy as np

from hexiseq_triton.planner.cost import Cost, Layer
from hexiseq_triton.planner.fsdp import boundary_seconds, optimizer_seconds
from hexiseq_triton.planner.rates import Floats

Terms = dict[str, Floats]
"""Seconds in one step, by name and rank."""


def terms_of(cost: Cost) -> Terms:
    """Return the parts of a step, in the order in which they come.

    Forward and backward each have what a rank does (token-wise work, all-to-alls, attention, and
    what the exchange adds to the attention beside it) and what it waits for: the others of its
    group, the slowest group, and FSDP's transfers where computing doesn't hide them. Backward
    includes what it computes again. Idle ranks wait.
    """
    layers = cost.layout.accumulation * cost.problem.model.layers
    again = cost.problem.workload.recompute == "full"
    terms: Terms = {}
    for name, directions, end in (
        ("forward", [cost.forward], cost.layer_seconds[0]),
        (
            "backward",
            [cost.forward, cost.backward] if again else [cost.backward],
            cost.layer_seconds[1],
        ),
    ):
        for part, seconds in _layer_terms(cost, directions, end).items():
            terms[f"{name} {part}"] = layers * seconds

    world = cost.problem.cluster.world_size
    exposed = cost.layout.accumulation * boundary_seconds(cost.problem)
    logits = cost.layout.accumulation * _by_rank(cost, cost.logits_seconds)
    optimizer = optimizer_seconds(cost.problem)
    return terms | {
        "logits": logits,
        "wait for logits": logits.max() - logits,
        "FSDP outside layers": np.full(world, exposed),
        "optimizer": optimizer,
        "wait for optimizer": optimizer.max() - optimizer,
    }


def _layer_terms(cost: Cost, directions: list[Layer], end: float) -> Terms:
    """Return the parts of one layer that takes `end` seconds: the sum of `directions`, or FSDP."""
    rows = cost.rows
    groups = np.sum([layer.group_seconds(rows) for layer in directions], axis=0)
    own = {
        "token-wise": [layer.token_wise for layer in directions],
        "all-to-all": [layer.shuffle[rows.group] for layer in directions],
        "attention": [layer.attention for layer in directions],
        "exchange": [layer.exchanged - layer.attention for layer in directions],
    }
    terms = {name: _by_rank(cost, np.sum(parts, axis=0)) for name, parts in own.items()}
    group_end = _by_rank(cost, groups[rows.group])
    return terms | {
        "wait for the group": np.maximum(group_end - np.sum(list(terms.values()), axis=0), 0.0),
        "wait for the slowest group": groups.max() - group_end,
        "FSDP": np.full(len(group_end), end - groups.max()),
    }


def _by_rank(cost: Cost, rows: Floats) -> Floats:
    """Return values of rows by rank; 0 for idle ranks."""
    ranks = np.zeros(cost.problem.cluster.world_size)
    ranks[cost.rows.rank] = rows
    return ranks
