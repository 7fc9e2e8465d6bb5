"""Candidate partitions of the ranks into head-parallel groups, before any tokens are dealt.

A grouping is a tuple of groups, a group a tuple of ranks. Families:

    one group; every rank its own group; one group a node; one group a GPU model
    inside nodes, groups of k, alike GPUs together; a node that k does not divide stays whole
    across sets of 2 ... all nodes, k ranks of each: sets of neighbours and sets that mix fast
    and slow nodes
    G groups of about equal total speed and so of unequal size: cut from the ranks in node order,
    or dealt fastest first to the slowest group
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from hexiseq_triton.planner.clusters import Cluster

Grouping = tuple[tuple[int, ...], ...]


def groupings(cluster: Cluster, speeds: Sequence[float]) -> dict[Grouping, str]:
    """Return candidate groupings with what each is called, without repetition.

    Args:
        cluster: whose ranks are grouped.
        speeds: of every rank, in any one unit.
    """
    nodes = [
        tuple(sorted(ranks, key=lambda r: (-speeds[r], cluster.devices[r].gpu, r)))
        for ranks in cluster.ranks_by_node.values()
    ]
    found: dict[Grouping, str] = {}
    for name, groups in _all(cluster, nodes, speeds):
        grouping = tuple(sorted(tuple(sorted(group)) for group in groups if group))
        found.setdefault(grouping, name)
    return found


def _all(
    cluster: Cluster, nodes: Sequence[tuple[int, ...]], speeds: Sequence[float]
) -> Iterator[tuple[str, list[tuple[int, ...]]]]:
    world = cluster.world_size
    yield "every GPU a group", [(rank,) for rank in range(world)]
    yield "one group a node", list(nodes)
    yield "one group of all", [tuple(range(world))]
    yield "one group a GPU model", _by_model(cluster, range(world))
    in_node = [group for node in nodes for group in _by_model(cluster, node)]
    yield "one group a GPU model and node", in_node
    for size in _divisors(max(len(node) for node in nodes)):
        yield f"groups of {size} in nodes", [g for node in nodes for g in _chunks(node, size)]
    yield from _across_nodes(nodes, speeds)
    yield from _alike(nodes, speeds, world)


def _by_model(cluster: Cluster, ranks: Sequence[int]) -> list[tuple[int, ...]]:
    def model(rank: int) -> str:
        return cluster.devices[rank].gpu

    return [tuple(group) for _, group in groupby(sorted(ranks, key=model), model)]


def _chunks(ranks: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    if len(ranks) % size:
        return [ranks]
    return [ranks[start : start + size] for start in range(0, len(ranks), size)]


def _across_nodes(
    nodes: Sequence[tuple[int, ...]], speeds: Sequence[float]
) -> Iterator[tuple[str, list[tuple[int, ...]]]]:
    """Yield groups that take k ranks of each node of a set; the sets are of equal size."""
    by_speed = sorted(nodes, key=lambda node: (-sum(speeds[r] for r in node), node))
    count = len(nodes)
    for size in _divisors(count)[1:]:
        neighbours = [by_speed[start : start + size] for start in range(0, count, size)]
        mixed = [by_speed[start :: count // size] for start in range(count // size)]
        for kind, sets in (("alike", neighbours), ("mixed", mixed)):
            for k in _divisors(min(len(node) for node in nodes)):
                groups = [group for nodes_of_set in sets for group in _slices(nodes_of_set, k)]
                yield f"{k} GPUs of each of {size} {kind} nodes a group", groups


def _slices(nodes: Sequence[tuple[int, ...]], k: int) -> list[tuple[int, ...]]:
    """Cut every node into as many slices as its smallest has k's; group the slices."""
    count = max(1, min(len(node) for node in nodes) // k)

    def slice_of(node: tuple[int, ...], i: int) -> tuple[int, ...]:
        return node[len(node) * i // count : len(node) * (i + 1) // count]

    return [tuple(r for node in nodes for r in slice_of(node, i)) for i in range(count)]


def _alike(
    nodes: Sequence[tuple[int, ...]], speeds: Sequence[float], world: int
) -> Iterator[tuple[str, list[tuple[int, ...]]]]:
    """Yield G groups of about equal total speed."""
    in_order = [rank for node in nodes for rank in node]
    fastest_first = sorted(in_order, key=lambda rank: (-speeds[rank], rank))
    counts = range(2, world) if world <= 16 else [g for g in _round_numbers(world) if g < world]
    for count in counts:
        yield f"{count} groups of alike speed, in node order", _cut(in_order, speeds, count)
        groups: list[list[int]] = [[] for _ in range(count)]
        totals = [0.0] * count
        for rank in fastest_first:
            g = min(range(count), key=lambda g: (totals[g], g))
            groups[g].append(rank)
            totals[g] += speeds[rank]
        yield f"{count} groups of alike speed, mixed", [tuple(group) for group in groups]


def _cut(ranks: Sequence[int], speeds: Sequence[float], count: int) -> list[tuple[int, ...]]:
    """Cut ranks into `count` runs; each rank goes to the run that its middle falls into."""
    total = sum(speeds[rank] for rank in ranks)
    runs: list[list[int]] = [[] for _ in range(count)]
    before = 0.0
    for rank in ranks:
        runs[int(count * (before + speeds[rank] / 2) / total)].append(rank)
        before += speeds[rank]
    return [tuple(run) for run in runs]


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if not number % d]


def _round_numbers(most: int) -> list[int]:
    """Return 2, 3, 4, 6, 8, 12, ... up to `most`."""
    return [
        n
        for n in range(2, most + 1)
        if n & (n - 1) == 0 or (n % 3 == 0 and n // 3 & (n // 3 - 1) == 0)
    ]
