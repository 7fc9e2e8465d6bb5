"""Split a plan anew for another batch: same groups on the same ranks, other tokens and heads.

A batch with other lengths than the plan's is dealt in the plan's proportions anyway. Where lengths
differ much, tokens and heads that suit them are a little better; finding them takes milliseconds,
since nothing else moves and no baselines are priced. Few rounds may also miss what the plan's
search found, uneven groups on a slow network for instance: then the plan's proportions stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hexiseq_triton.errors import InfeasibleError
from hexiseq_triton.planner.balance import Dealing, balanced, key
from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.cost import evaluate
from hexiseq_triton.planner.explain import check_made_for, memory_limit_share_of, workload_of
from hexiseq_triton.planner.layouts import out_of_memory
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.moves import moved
from hexiseq_triton.planner.partition import apportion
from hexiseq_triton.planner.plans import Plan, ReplicaPlan
from hexiseq_triton.planner.problem import (
    Group,
    Layout,
    Problem,
    Replica,
    checked_memory_limit_share,
)
from hexiseq_triton.planner.stages import Frame, Ranks, Splitter
from hexiseq_triton.planner.write import written

_ROUNDS = 2


def resplit(
    plan: Plan | str | Path,
    cluster: Cluster | str | Path,
    model: ModelSpec | str | Path,
    *,
    seq_len: int,
    documents: Sequence[int] | None = None,
    memory_limit_share: float | None = None,
) -> Plan:
    """Return the plan with tokens and heads for sequences of another length.

    Args:
        plan: a Plan, or the path of a plan file, whose replicas, groups, nesting order, passes and
            numbers of sequences stay.
        cluster: that the plan was made for; a Cluster, or the path of a cluster file.
        model: that the plan was made for; a ModelSpec, a preset's name, or the path of a
            config.json or YAML file.
        seq_len: tokens of one sequence.
        documents: lengths of the documents in a sequence; one document if left out.
        memory_limit_share: how much of each GPU's memory may be used; the plan's own if left out.

    Raises:
        ConfigError: if a file or an argument is wrong.
        InfeasibleError: if the groups cannot hold sequences of this length.
        PlanError: if the plan was made for another cluster or model.
    """
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    cluster = cluster if isinstance(cluster, Cluster) else Cluster.load(cluster)
    model = model if isinstance(model, ModelSpec) else ModelSpec.load(model)
    check_made_for(plan, cluster, model)
    workload = workload_of(plan, documents, seq_len=seq_len)
    if memory_limit_share is None:
        share = memory_limit_share_of(plan, cluster)
    else:
        share = checked_memory_limit_share(memory_limit_share)
    problem = Problem(cluster, model, workload, plan.exchange, share)
    splits = _resplit(Splitter(problem), plan), _in_proportion(plan, seq_len)
    cost = min((evaluate(problem, _layout(plan, replicas)) for replicas in splits), key=key)
    if not cost.fits:
        raise InfeasibleError(f"seq_len {seq_len} does not fit: {out_of_memory(problem, cost)}")
    result = written(problem, cost, plan.strategy, {}, plan.notes)
    result = replace(result, executable=result.executable and plan.executable)
    result.validate()
    return result


def _layout(plan: Plan, replicas: tuple[Replica, ...]) -> Layout:
    exchange = plan.exchange
    return Layout(plan.strategy, replicas, plan.accumulation, exchange.arrangement, exchange.mode)


def _resplit(splitter: Splitter, plan: Plan) -> tuple[Replica, ...]:
    """Return all replicas split anew; those on alike ranks once."""
    frame = Frame(plan.strategy, plan.accumulation, plan.exchange.arrangement)
    solved: dict[object, tuple[Replica, list[int]]] = {}
    replicas = []
    for replica in plan.replicas:
        grouping = [_ranks(replica, g) for g in range(len(replica.groups))]
        ranks = [rank for group in grouping for rank in group]
        make = (tuple(splitter.make(group) for group in grouping), replica.sequences)
        if make not in solved:
            dealing = Dealing("", grouping, replica.sequences, _ROUNDS, in_order=True)
            cost = balanced(splitter, frame, dealing)
            solved[make] = (cost.layout.replicas[0], ranks)
        found, old = solved[make]
        replicas.append(moved(found, dict(zip(old, ranks, strict=True))))
    return tuple(replicas)


def _in_proportion(plan: Plan, seq_len: int) -> tuple[Replica, ...]:
    """Return all replicas with the plan's heads, and tokens as `partition.deal` counts them."""
    replicas = []
    for replica in plan.replicas:
        totals = apportion(replica.sequences * seq_len, [group.tokens for group in replica.groups])
        groups = (
            Group(
                _ranks(replica, g),
                tuple(apportion(total, [share.tokens for share in group.ranks])),
                tuple(share.num_q_heads for share in group.ranks),
            )
            for g, (group, total) in enumerate(zip(replica.groups, totals, strict=True))
        )
        replicas.append(Replica(tuple(groups), replica.sequences))
    return tuple(replicas)


def _ranks(replica: ReplicaPlan, g: int) -> Ranks:
    return tuple(share.rank for share in replica.groups[g].ranks)
