"""Whether a plan contradicts itself: integers only, nothing shared with the search that made it."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

from hexiseq_triton.errors import PlanError
from hexiseq_triton.planner.heads import kv_heads_of

if TYPE_CHECKING:
    from hexiseq_triton.planner.plans import GroupPlan, Plan, RankShare, ReplicaPlan

PLAN_VERSION = 1


def check_plan(plan: Plan) -> None:
    """Check that every token of a sequence and every query head has one owner.

    Raises:
        PlanError: naming the replica, group and rank, what it holds and what it should.
    """
    _check_numbers(plan)
    _check_ranks(plan)
    for index, replica in enumerate(plan.replicas):
        for g, group in enumerate(replica.groups):
            _check_group(plan, f"replica {index}, group {g}", group)
        _check_tokens(plan, index, replica)


def _check_numbers(plan: Plan) -> None:
    if plan.version != PLAN_VERSION:
        raise PlanError(f"plan version {plan.version}; this release reads {PLAN_VERSION}")
    least = {"world_size": 1, "seq_len": 1, "num_heads": 1, "num_kv_heads": 1, "accumulation": 1}
    for name, number in least.items():
        if getattr(plan, name) < number:
            raise PlanError(f"{name} is {getattr(plan, name)}; it must be at least {number}")
    if plan.head_dim is not None and plan.head_dim < 1:
        raise PlanError(f"head_dim is {plan.head_dim}; it must be at least 1, or left out")
    if plan.num_heads % plan.num_kv_heads:
        raise PlanError(
            f"{plan.num_heads} query heads do not divide by {plan.num_kv_heads} KV heads"
        )
    if plan.exchange.chunk_tokens < 1 or plan.exchange.window < 1:
        raise PlanError("exchange.chunk_tokens and exchange.window must be at least 1")


def _check_ranks(plan: Plan) -> None:
    if not plan.replicas:
        raise PlanError("the plan has no replica")
    times = Counter([share.rank for share in plan.shares] + [idle.rank for idle in plan.idle])
    twice = sorted(rank for rank, count in times.items() if count > 1)
    if twice:
        raise PlanError(f"ranks {twice} stand in the plan more than once")
    outside = sorted(rank for rank in times if not 0 <= rank < plan.world_size)
    if outside:
        raise PlanError(f"ranks {outside} lie outside a world of {plan.world_size}")


def _check_tokens(plan: Plan, index: int, replica: ReplicaPlan) -> None:
    expected = replica.sequences * plan.seq_len
    if replica.sequences < 1 or replica.tokens != expected:
        raise PlanError(
            f"replica {index} holds {replica.tokens} tokens; {replica.sequences} sequences of "
            f"{plan.seq_len} are {expected}"
        )


def _check_group(plan: Plan, where: str, group: GroupPlan) -> None:
    if not group.ranks:
        raise PlanError(f"{where} has no rank")
    for share in group.ranks:
        _check_share(plan, where, share)
    held = sorted(share.q_heads for share in group.ranks if share.num_q_heads)
    edges = [(0, 0), *held, (plan.num_heads, plan.num_heads)]
    if any(a[1] != b[0] for a, b in pairwise(edges)):
        raise PlanError(
            f"{where} holds query heads {held}; together they must be "
            f"[0, {plan.num_heads}) with every head once"
        )


def _check_share(plan: Plan, where: str, share: RankShare) -> None:
    if share.tokens < 0:
        raise PlanError(f"{where}: rank {share.rank} holds {share.tokens} tokens")
    start, stop = share.q_heads
    if not 0 <= start <= stop <= plan.num_heads:
        raise PlanError(
            f"{where}: rank {share.rank} has query heads [{start}, {stop}); they must lie in "
            f"[0, {plan.num_heads})"
        )
    needed = kv_heads_of(share.q_heads, plan.q_per_kv)
    if share.kv_heads != needed:
        raise PlanError(
            f"{where}: rank {share.rank} has KV heads {share.kv_heads}; its query heads "
            f"{share.q_heads} read {needed}"
        )
