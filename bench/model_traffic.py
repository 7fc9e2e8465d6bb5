"""Bytes that a step moves between GPUs of different models, FSDP left out.

Counted pair by pair from a layout: the all-to-alls of each group, and keys, values and their
gradients between groups. Where several ranks of a group hold the KV heads that a rank asks for,
they share its requests.
"""

from __future__ import annotations

import numpy as np

from hexiseq_triton.planner.cost import Cost
from hexiseq_triton.planner.rates import Floats
from hexiseq_triton.planner.sight import sight_of
from hexiseq_triton.planner.traffic import BF16, FLOAT32


def between_models(cost: Cost) -> float:
    """Return bytes a step between ranks of different GPU models."""
    rows, problem = cost.rows, cost.problem
    gpu = np.array([device.gpu for device in problem.cluster.devices])[rows.rank]
    differ = gpu[:, None] != gpu
    forwards = 2 if problem.workload.recompute == "full" else 1
    layer = (all_to_all_bytes(cost, forwards) + exchange_bytes(cost, forwards))[differ].sum()
    return float(cost.layout.accumulation * problem.model.layers * layer)


def all_to_all_bytes(cost: Cost, forwards: int) -> Floats:
    """Return [rows, rows], bytes of one layer between rows; what comes back counts too."""
    rows, head_dim = cost.rows, cost.problem.model.head_dim
    q, kv = rows.q_heads, 2 * rows.kv_heads
    forward = BF16 * head_dim * (2 * q + kv)
    backward = (2 * BF16 * head_dim + FLOAT32) * q + FLOAT32 * head_dim * kv
    same = rows.group[:, None] == rows.group
    return same * rows.tokens[:, None] * (forwards * forward + backward)


def exchange_bytes(cost: Cost, forwards: int) -> Floats:
    """Return [rows, rows], bytes of one layer that each row fetches of each, and gives back."""
    rows, problem = cost.rows, cost.problem
    start, stop = rows.kv_ranges.T
    groups = np.arange(len(rows.group_starts))
    receiver, sender = (table.ravel() for table in np.meshgrid(groups, groups, indexing="ij"))
    fetches = sight_of(problem, cost.layout, rows).fetches.between(receiver, sender)
    fetched = fetches.reshape(len(groups), -1)[rows.group[:, None], rows.group]

    heads = np.arange(problem.model.kv_heads)
    holds = (start[:, None] <= heads) & (heads < stop[:, None])
    holders = np.add.reduceat(holds, rows.group_starts, axis=0)[rows.group]
    share = holds @ (holds / np.maximum(holders, 1)).T
    # K and V once for each forward and once in backward; dK and dV, in float32, once
    num_bytes = 2 * problem.model.head_dim * (BF16 * (forwards + 1) + FLOAT32)
    return num_bytes * fetched * share
