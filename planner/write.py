"""Write a layout down as a plan, with what is predicted of it and what it was compared with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from hexiseq_triton.planner.bound import lower_bound
from hexiseq_triton.planner.cost import Cost
from hexiseq_triton.planner.gap import gap_parts
from hexiseq_triton.planner.heads import kv_heads_of
from hexiseq_triton.planner.layouts import Priced
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.plans import (
    BaselineResult,
    GroupPlan,
    IdleRank,
    Plan,
    Prediction,
    RankShare,
    ReplicaPlan,
)
from hexiseq_triton.planner.problem import Group, Problem
from hexiseq_triton.planner.workload import Workload


def written(
    problem: Problem,
    cost: Cost,
    strategy: str,
    baselines: Mapping[str, Priced],
    notes: Sequence[str] = (),
) -> Plan:
    """Return the plan of a layout.

    Args:
        problem: what was planned for.
        cost: of the layout.
        strategy: how it was found.
        baselines: what it was compared with, by name.
        notes: what a reader should know of how it was found.
    """
    workload, model = problem.workload, problem.model
    bound = lower_bound(problem)
    assert bound is not None, "a layout fits"
    layout = cost.layout
    replicas = tuple(
        ReplicaPlan(
            tuple(_group_plan(problem, cost, group) for group in replica.groups), replica.sequences
        )
        for replica in layout.replicas
    )
    working = {rank for group in layout.groups for rank in group.ranks}
    idle = tuple(
        IdleRank(device.rank, device.gpu, device.node)
        for device in problem.cluster.devices
        if device.rank not in working
    )
    return Plan(
        world_size=problem.cluster.world_size,
        seq_len=workload.seq_len,
        num_heads=model.heads,
        num_kv_heads=model.kv_heads,
        replicas=replicas,
        idle=idle,
        head_dim=model.head_dim,
        causal=workload.causal,
        accumulation=layout.accumulation,
        recompute=workload.recompute,
        exchange=replace(problem.exchange, arrangement=layout.arrangement, mode=layout.exchange),
        strategy=strategy,
        executable=layout.executable,
        notes=tuple(notes),
        predicted=Prediction(cost.step_seconds, workload.step_tokens / cost.step_seconds),
        lower_bound_seconds=bound.seconds,
        gap=cost.step_seconds / bound.seconds - 1,
        gap_parts=gap_parts(cost, bound),
        baselines={name: _result(priced) for name, priced in baselines.items()},
        device_names={name: gpu.device_names for name, gpu in problem.cluster.gpus.items()},
        made_from={
            "cluster": problem.cluster.digest,
            "model": noun_digest(model),
            "workload": noun_digest(workload),
        },
    )


def _result(priced: Priced) -> BaselineResult:
    if priced.cost is None:
        return BaselineResult(None, priced.reason)
    executable = priced.cost.layout.executable
    return BaselineResult(priced.cost.step_seconds, priced.reason, executable)


def _group_plan(problem: Problem, cost: Cost, group: Group) -> GroupPlan:
    q_per_kv = problem.model.heads // problem.model.kv_heads
    memory, limit, busy = cost.memory_bytes, cost.memory_limit, cost.busy_seconds
    shares = []
    start = 0
    for rank, tokens, count in zip(group.ranks, group.tokens, group.heads, strict=True):
        device, q_heads = problem.cluster.devices[rank], (start, start + count)
        shares.append(
            RankShare(
                rank=rank,
                tokens=tokens,
                q_heads=q_heads,
                kv_heads=kv_heads_of(q_heads, q_per_kv),
                gpu=device.gpu,
                node=device.node,
                memory_bytes=int(memory[rank]),
                memory_limit_bytes=int(limit[rank]),
                seconds=float(busy[rank]),
            )
        )
        start += count
    return GroupPlan(tuple(shares))


def noun_digest(noun: ModelSpec | Workload) -> str:
    """Return the hash by which a plan's `made_from` knows a model or a workload."""
    content = asdict(noun)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
