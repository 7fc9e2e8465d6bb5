"""What a plan was made for, and its cost, evaluated again.

Its file holds what ranks do, not the parts of their time.
"""

from __future__ import annotations

from collections.abc import Sequence

from hexiseq_triton.errors import PlanError
from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.cost import Cost, evaluate
from hexiseq_triton.planner.files import build
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.plans import Plan, ReplicaPlan
from hexiseq_triton.planner.problem import (
    Group,
    Layout,
    Problem,
    Replica,
    checked_memory_limit_share,
)
from hexiseq_triton.planner.rates import MEMORY_LIMIT_SHARE
from hexiseq_triton.planner.workload import Workload
from hexiseq_triton.planner.write import noun_digest


def check_made_for(plan: Plan, cluster: Cluster, model: ModelSpec) -> None:
    """Check that a plan is for this cluster and model; one written by hand fits more of them.

    Raises:
        PlanError: naming the first thing that differs, with both values.
    """
    wanted = {
        "ranks": (plan.world_size, cluster.world_size),
        "query heads": (plan.num_heads, model.heads),
        "KV heads": (plan.num_kv_heads, model.kv_heads),
        "head dimension": (plan.head_dim or model.head_dim, model.head_dim),
    }
    for what, (planned, given) in wanted.items():
        if planned != given:
            raise PlanError(
                f"the plan is for {planned} {what} and was given {given}; give the cluster and "
                "model it was made for, or plan again"
            )
    for share in plan.shares:
        device = cluster.devices[share.rank]
        if share.gpu not in (None, device.gpu):
            raise PlanError(
                f"the plan has rank {share.rank} on {share.gpu} of node {share.node}, and in the "
                f"cluster it is {device.gpu} of node {device.node}; give the cluster it was made "
                "for, or plan again"
            )
    made = plan.made_from.get("cluster")
    if made not in (None, cluster.digest):
        raise PlanError(
            f"the plan was made for a cluster with digest {made[:12]}, and this one has "
            f"{cluster.digest[:12]}: the same GPUs, but other links or rates; plan again"
        )
    if plan.made_from.get("model") not in (None, noun_digest(model)):
        raise PlanError(
            "the plan was made for another model: the same heads, but other layers, widths or "
            "vocabulary; give the model it was made for, or plan again"
        )


def workload_of(
    plan: Plan, documents: Sequence[int] | None = None, *, seq_len: int | None = None
) -> Workload:
    """Return what a step of the plan has to do, or of its like for sequences of another length.

    One document a sequence if none are given. A plan that doesn't say recomputes fully.

    Raises:
        ConfigError: if the length is out of range, or the documents don't fill a sequence.
    """
    fields = {
        "seq_len": plan.seq_len if seq_len is None else seq_len,
        "global_batch": plan.global_batch,
        "accumulation": plan.accumulation,
        "recompute": plan.recompute or "full",
        "causal": plan.causal,
        "documents": documents,
    }
    return build(Workload, fields, "the plan's workload")


def memory_limit_share_of(plan: Plan, cluster: Cluster) -> float:
    """Return how much of each GPU's memory a plan may use; the default if it doesn't say."""
    for share in plan.shares:
        if share.memory_limit_bytes:
            gpu = cluster.gpus[cluster.devices[share.rank].gpu]
            # the file has whole bytes, of which 9 digits of the share are left
            return round(share.memory_limit_bytes / (gpu.memory_gb.value * 1e9), 9)
    return MEMORY_LIMIT_SHARE


def cost_of(
    plan: Plan,
    cluster: Cluster,
    model: ModelSpec,
    workload: Workload,
    memory_limit_share: float | None = None,
) -> Cost:
    """Return what a plan costs on the cluster and for the model and workload it was made for.

    Left out, `memory_limit_share` is the plan's own.
    """
    if memory_limit_share is None:
        share = memory_limit_share_of(plan, cluster)
    else:
        share = checked_memory_limit_share(memory_limit_share)
    problem = Problem(cluster, model, workload, plan.exchange, share)
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
