"""The communicators of a plan: one for all ranks, one for each replica, one for each HP group.

Routes, all-to-alls and FSDP each have their own, so that none waits behind another's transfers.
All ranks make them in one order and use each at once, so that nothing is connected later, between
kernels that wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hexiseq_triton.channel import Channel
from hexiseq_triton.planner import Plan, RankShare
from hexiseq_triton.planner.plans import ReplicaPlan


class Communicators(NamedTuple):
    """What one rank communicates through.

    Attributes:
        world: all ranks, for FSDP and what all agree on.
        routes: the ranks of this rank's replica; `heads` where they are one group.
        heads: the ranks of this rank's HP group.
        groups: all process groups that this rank is in, to be destroyed in the end.
    """

    world: dist.ProcessGroup
    routes: Channel
    heads: Channel
    groups: list[dist.ProcessGroup]


def make_communicators(
    plan: Plan,
    rank: int,
    world_ranks: Mapping[int, int],
    device: torch.device,
    timeout: timedelta,
) -> Communicators:
    """Make all communicators of a plan; a call of all ranks.

    Args:
        plan: the plan.
        rank: this process's rank in it.
        world_ranks: the process that runs each rank.
        device: this process's device.
        timeout: how long a transfer waits for the other end.
    """
    groups: list[dist.ProcessGroup] = []

    def group_of(ranks: Sequence[int]) -> dist.ProcessGroup | None:
        processes = [world_ranks[other] for other in ranks]
        options = _options(device, timeout)
        group: dist.ProcessGroup = dist.new_group(processes, timeout=timeout, pg_options=options)
        if rank not in ranks:
            return None
        # a point-to-point call may not be the first use of a communicator
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        groups.append(group)
        return group

    def channel_of(ranks: Sequence[int], peers: Sequence[int]) -> Channel | None:
        group = group_of(ranks) if len(ranks) > 1 else None
        if group is None:
            return None
        channel = Channel(group, rank, world_ranks, device)
        _connect(channel, peers, device)
        return channel

    alone = Channel(None, rank, world_ranks, device)
    world = group_of(sorted(world_ranks, key=lambda other: world_ranks[other]))
    assert world is not None
    routes = heads = alone
    for replica in plan.replicas:
        everyone = [share.rank for share in replica.shares]
        if len(replica.groups) > 1:
            routes = channel_of(everyone, _route_ends(replica, rank)) or routes
        for group in replica.groups:
            members = [share.rank for share in group.ranks]
            heads = channel_of(members, members) or heads
        if len(replica.groups) == 1 and rank in everyone:
            routes = heads  # nothing travels between groups
    return Communicators(world, routes, heads, groups)


def _options(device: torch.device, timeout: timedelta) -> Any:
    """Return what NCCL is told: of the kernels that wait for room, its own go first."""
    if device.type != "cuda":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # else PyTorch warns that it takes the argument
    return options


def _route_ends(replica: ReplicaPlan, rank: int) -> list[int]:
    """Return the ranks of other groups that hold some of this rank's KV heads."""
    found: list[int] = []
    own: RankShare | None = None
    for group in replica.groups:
        mine = [share for share in group.ranks if share.rank == rank]
        if mine:
            own = mine[0]
        else:
            found += [share.rank for share in group.ranks]
    held = {share.rank: share.kv_heads for share in replica.shares}
    if own is None:
        return []
    start, stop = own.kv_heads
    return [other for other in found if max(start, held[other][0]) < min(stop, held[other][1])]


def _connect(channel: Channel, peers: Sequence[int], device: torch.device) -> None:
    """Send something to each peer, and wait for what it sends."""
    sent = torch.zeros(1, device=device)
    others = [peer for peer in peers if peer != channel.rank]
    channel.start(
        [(peer, sent) for peer in others],
        [(peer, torch.empty_like(sent)) for peer in others],
        "the first transfers",
    ).wait()
