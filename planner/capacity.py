"""What memory holds: the layout that leaves most of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hexiseq_triton.planner.balance import Dealing, balanced_apart, key
from hexiseq_triton.planner.cost import Cost
from hexiseq_triton.planner.groupings import Grouping
from hexiseq_triton.planner.memory import FIXED, memory_model
from hexiseq_triton.planner.problem import Problem
from hexiseq_triton.planner.stages import Frame, Splitter

_LITTLE_ROOM = (0.0, 0.001, 0.1, 0.5)
"""Ranks with less than this share of the roomiest rank's room may be idle."""


def roomiest(splitter: Splitter) -> Cost:
    """Return the cost of the layout that leaves most memory, of a few that use it evenly.

    Fewest sequences a pass, GPUs with room in one replica, tokens as memory has room. What heads
    take does not depend on the groups, but for receive buffers and for KV heads held twice. The
    first layout that fits is the answer: large groups, which take longest to split, come last.
    """
    workload = splitter.problem.workload
    passes = workload.accumulations[-1]
    sequences = workload.global_batch // passes
    frame = Frame("", passes)
    costs: list[Cost] = []
    for grouping in dict.fromkeys(_groupings(splitter)):
        starts = list(_starts(splitter, grouping, sequences * workload.seq_len))
        if not starts and costs:
            continue
        dealings = [
            Dealing("as memory has room", grouping, sequences, 1, start=start)
            for start in starts or [None]
        ]
        costs += balanced_apart(splitter, frame, dealings)
        if any(cost.fits for cost in costs):
            break
    return min(costs, key=key)


def most_tokens(problem: Problem, ranks: Sequence[int]) -> float:
    """Return tokens of a pass that ranks cannot hold more of, in whatever layout.

    Memory without communicators and buffers, and every head held once; none if some rank of the
    cluster has no room for its part of the states.
    """
    memory, limits = memory_model(problem), problem.rates.memory_limit
    if memory.idle > limits.min():
        return 0.0
    sizes = memory.whole_tokens(problem.model)
    rooms = limits[list(ranks)] - memory.moments[:, FIXED, None]  # [moments, ranks]
    return float((rooms.sum(axis=1)[sizes > 0] / sizes[sizes > 0]).min())


def _starts(
    splitter: Splitter, grouping: Grouping, num_tokens: int
) -> Iterator[tuple[float, ...] | None]:
    """Yield tokens of each group: in proportion to speed, and to room; nothing if none can fit.

    In proportion to speed, the fastest are full to the last token, where one block more, which
    rounding may add, is one too many; in proportion to room, all are about as full.
    """
    if most_tokens(splitter.problem, [rank for ranks in grouping for rank in ranks]) < num_tokens:
        return
    yield None
    rooms = [splitter.room_for_tokens(ranks, len(grouping) == 1) for ranks in grouping]
    if len(grouping) > 1 and sum(rooms) > num_tokens:
        yield tuple(room * num_tokens / sum(rooms) for room in rooms)


def _groupings(splitter: Splitter) -> Iterator[Grouping]:
    """Yield groupings of all ranks, and of those with room, small groups first."""
    cluster, heads = splitter.problem.cluster, splitter.problem.model.heads
    ranks = range(cluster.world_size)
    rooms = [splitter.room_for_tokens((rank,), alone=False) for rank in ranks]
    some = [
        frozenset(rank for rank in ranks if rooms[rank] >= share * max(rooms))
        for share in _LITTLE_ROOM
    ]
    for kept in some:
        yield tuple((rank,) for rank in sorted(kept))
    for kept in some:
        nodes = [tuple(r for r in node if r in kept) for node in cluster.ranks_by_node.values()]
        if all(len(node) <= heads for node in nodes):
            yield tuple(node for node in nodes if node)
    for kept in some:
        if len(kept) <= heads:
            yield (tuple(sorted(kept)),)
