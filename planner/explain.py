"""A plan's cost, evaluated again: its file holds what ranks do, not the parts of their time."""

from __future__ import annotations

from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.cost import Cost, evaluate
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.plans import Plan, ReplicaPlan
from hexiseq_triton.planner.problem import Group, Layout, Problem, Replica
from hexiseq_triton.planner.workload import Workload


def cost_of(plan: Plan, cluster: Cluster, model: ModelSpec, workload: Workload) -> Cost:
    """Return what a plan costs on the cluster and for the model and workload it was made for."""
    problem = Problem(cluster, model, workload, plan.exchange)
    replicas = tuple(_replica(replica) for replica in plan.replicas)
    layout = Layout(
        plan.strategy,
        replicas,
        plan.accumulation,
        plan.exchange.arrangement,
        plan.exchange.mode,
    )
    return evaluate(problem, layout)


def _replica(replica: ReplicaPlan) -> Replica:
    groups = tuple(
        Group(
            tuple(share.rank for share in group.ranks),
            tuple(share.tokens for share in group.ranks),
            tuple(share.num_q_heads for share in group.ranks),
        )
        for group in replica.groups
    )
    return Replica(groups, replica.sequences)
