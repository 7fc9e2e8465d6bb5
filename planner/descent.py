"""Coordinate descent with simple rules, to see what the search's stages are worth.

Groups lie inside nodes. They share the tokens in proportion to a power of their speed: 1 is in
proportion to computing, 1/2 its square root. Then, from equal heads and tokens, single heads and
blocks of tokens go from the rank or group that ends last to another while the step gets shorter.
The rules are those that HexiSeq's scheduler is reported to use (arXiv:2605.07569).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hexiseq_triton.planner.balance import key
from hexiseq_triton.planner.cost import Cost
from hexiseq_triton.planner.groupings import Grouping
from hexiseq_triton.planner.neighbours import shifted
from hexiseq_triton.planner.partition import apportion
from hexiseq_triton.planner.problem import Group, Problem, Replica, nested
from hexiseq_triton.planner.stages import Frame, Splitter, whole_units

_MOST_STEPS = 400


def descended(problem: Problem, power: float, most_steps: int = _MOST_STEPS) -> Cost:
    """Return the cost of the best layout that the descent finds, over all sizes of group.

    Args:
        problem: what is planned for; one replica, as many passes as the workload allows.
        power: of a group's speed, to which its tokens are in proportion.
        most_steps: evaluations for each size of group; with 1 it stays where it begins.
    """
    splitter = Splitter(problem)
    largest = max(len(ranks) for ranks in problem.cluster.ranks_by_node.values())
    costs = [
        _descended(
            splitter, _first(splitter, _inside_nodes(problem, size), power), size, most_steps
        )
        for size in range(1, min(largest, problem.model.heads) + 1)
    ]
    return min(costs, key=key)


def _inside_nodes(problem: Problem, size: int) -> Grouping:
    nodes = problem.cluster.ranks_by_node.values()
    return tuple(
        node[start : start + size] for node in nodes for start in range(0, len(node), size)
    )


def _first(splitter: Splitter, grouping: Grouping, power: float) -> Replica:
    workload = splitter.problem.workload
    sequences = workload.global_batch // workload.accumulations[-1]
    speed = [sum(splitter.alone[rank] for rank in ranks) ** power for ranks in grouping]
    total = sequences * workload.seq_len
    shares = whole_units(total, [total * s / sum(speed) for s in speed], splitter.unit)
    heads = splitter.problem.model.heads
    groups = [
        Group(
            ranks,
            tuple(apportion(count, [1] * len(ranks))),
            tuple(apportion(heads, [1] * len(ranks))),
        )
        for ranks, count in zip(grouping, shares, strict=True)
    ]
    return Replica(nested(groups), sequences)


def _descended(splitter: Splitter, replica: Replica, size: int, most_steps: int) -> Cost:
    frame = Frame(f"groups of {size} in nodes", splitter.problem.workload.accumulations[-1])
    last = splitter.evaluations + most_steps
    cost = splitter.judged(frame, [replica])
    while True:
        for neighbour in _neighbours(splitter, cost):
            if splitter.evaluations >= last:
                return cost
            found = splitter.judged(frame, [neighbour])
            if key(found) < key(cost):
                cost = found
                break
        else:
            return cost


def _neighbours(splitter: Splitter, cost: Cost) -> Iterator[Replica]:
    """Yield the replica after a head or a block of tokens left the slowest group's ranks."""
    replica = cost.layout.replicas[0]
    slowest = int(cost.group_seconds.argmax())
    group, unit = replica.groups[slowest], splitter.unit
    for giver in range(len(group.ranks)):
        for taker in range(len(group.ranks)):
            if giver != taker and group.heads[giver]:
                yield _with(replica, slowest, heads=shifted(group.heads, giver, taker, 1))
            for step in (16 * unit, unit):
                if giver != taker and group.tokens[giver] >= step:
                    tokens = shifted(group.tokens, giver, taker, step)
                    yield _with(replica, slowest, tokens=tokens)


def _with(replica: Replica, g: int, **changes: tuple[int, ...]) -> Replica:
    groups = list(replica.groups)
    groups[g] = replace(groups[g], **changes)
    return replace(replica, groups=tuple(groups))
