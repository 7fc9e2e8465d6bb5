"""Stage I: candidate partitions of a replica's ranks into head-parallel groups, before any tokens.

A grouping is a tuple of groups, a group a tuple of ranks. Families:

    every rank its own group; one group of all; one group a node; one group a kind of GPU
    inside nodes, groups of k, alike ranks together; a node that k does not divide stays whole
    alike ranks of a node, in groups about as fast as m of the fastest GPUs
    across sets of 2 ... all nodes, k ranks of each: sets of neighbours and sets that mix fast
    and slow nodes
    G groups of about equal total speed and so of unequal size: cut from the ranks in node order,
    or dealt fastest first to the slowest group

Groups have at most as many ranks as there are heads. Five ranks or fewer are put into groups in
every way there is.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import groupby

Nodes = Sequence[tuple[int, ...]]
"""The ranks of a replica, node by node."""
Grouping = tuple[tuple[int, ...], ...]
FEW_RANKS = 5
"""Up to so many ranks, all partitions are candidates."""


def groupings(
    nodes: Nodes, speeds: Sequence[float], kinds: Sequence[int], num_heads: int
) -> dict[Grouping, str]:
    """Return candidate groupings with what each is called, without repetition.

    Args:
        nodes: whose ranks are grouped.
        speeds: of every rank of the cluster, in any one unit.
        kinds: of every rank of the cluster; ranks of one kind are alike.
        num_heads: query heads; a larger group would leave a rank without work in attention.
    """
    fastest_first = [tuple(sorted(node, key=lambda r: (-speeds[r], kinds[r], r))) for node in nodes]
    order = {rank: at for at, rank in enumerate(r for node in fastest_first for r in node)}
    found: dict[Grouping, str] = {}
    few = len(order) <= FEW_RANKS
    families = _partitions(list(order)) if few else _families(fastest_first, speeds, kinds)
    for name, groups in families:
        kept = (tuple(sorted(group, key=order.__getitem__)) for group in groups if group)
        grouping = tuple(sorted(kept, key=lambda group: order[group[0]]))
        if few or max(len(group) for group in grouping) <= num_heads:
            found.setdefault(grouping, name)
    return found


def _families(
    nodes: Nodes, speeds: Sequence[float], kinds: Sequence[int]
) -> Iterator[tuple[str, Sequence[tuple[int, ...]]]]:
    ranks = [rank for node in nodes for rank in node]
    yield "one group of all", [tuple(ranks)]
    yield "one group a node", list(nodes)
    yield "one group a kind of GPU", _by_kind(kinds, ranks)
    in_node = [group for node in nodes for group in _by_kind(kinds, node)]
    yield "one group a kind and node", in_node
    for size in reversed(_divisors(max(len(node) for node in nodes))):
        yield f"groups of {size} in nodes", [g for node in nodes for g in _chunks(node, size)]
    yield from _as_fast(in_node, speeds)
    yield from _across_nodes(nodes, speeds)
    yield from _alike(nodes, speeds)


def _by_kind(kinds: Sequence[int], ranks: Sequence[int]) -> list[tuple[int, ...]]:
    def kind(rank: int) -> int:
        return kinds[rank]

    return [tuple(group) for _, group in groupby(sorted(ranks, key=kind), kind)]


def _chunks(ranks: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    if len(ranks) % size:
        return [ranks]
    return [ranks[start : start + size] for start in range(0, len(ranks), size)]


def _as_fast(
    alike: Sequence[tuple[int, ...]], speeds: Sequence[float]
) -> Iterator[tuple[str, list[tuple[int, ...]]]]:
    """Yield groups of alike ranks of one node, each about as fast as m of the fastest GPUs."""
    fastest = max(speeds[ranks[0]] for ranks in alike)
    for m in (1, 2, 4):
        groups = [
            group
            for ranks in alike
            for group in _cut(
                ranks, speeds, max(1, round(len(ranks) * speeds[ranks[0]] / (m * fastest)))
            )
        ]
        yield f"alike GPUs of a node in groups as fast as {m}", groups


def _across_nodes(
    nodes: Nodes, speeds: Sequence[float]
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


def _slices(nodes: Nodes, k: int) -> list[tuple[int, ...]]:
    """Cut every node into as many slices as its smallest has k's; group the slices."""
    count = max(1, min(len(node) for node in nodes) // k)

    def slice_of(node: tuple[int, ...], i: int) -> tuple[int, ...]:
        return node[len(node) * i // count : len(node) * (i + 1) // count]

    return [tuple(r for node in nodes for r in slice_of(node, i)) for i in range(count)]


def _alike(nodes: Nodes, speeds: Sequence[float]) -> Iterator[tuple[str, list[tuple[int, ...]]]]:
    """Yield G groups of about equal total speed."""
    in_order = [rank for node in nodes for rank in node]
    fastest_first = sorted(in_order, key=lambda rank: (-speeds[rank], rank))
    for count in _round_numbers(len(in_order) - 1):
        yield f"{count} groups of alike speed, in node order", _cut(in_order, speeds, count)
        groups: list[list[int]] = [[] for _ in range(count)]
        totals = [(0.0, g) for g in range(count)]
        for rank in fastest_first:
            total, g = totals[0]
            groups[g].append(rank)
            heapq.heapreplace(totals, (total + speeds[rank], g))
        yield f"{count} groups of alike speed, mixed", [tuple(group) for group in groups]


def _cut(ranks: Sequence[int], speeds: Sequence[float], count: int) -> list[tuple[int, ...]]:
    """Cut ranks into `count` runs; each rank goes to the run that its middle falls into."""
    total = sum(speeds[rank] for rank in ranks)
    runs: list[list[int]] = [[] for _ in range(count)]
    before = 0.0
    for rank in ranks:
        runs[min(count - 1, int(count * (before + speeds[rank] / 2) / total))].append(rank)
        before += speeds[rank]
    return [tuple(run) for run in runs]


def _partitions(ranks: Sequence[int]) -> Iterator[tuple[str, list[tuple[int, ...]]]]:
    """Yield every partition of a few ranks, named by its sizes."""
    for groups in _all_partitions(ranks):
        sizes = sorted((len(group) for group in groups), reverse=True)
        yield f"groups of {', '.join(map(str, sizes))}", groups


def _all_partitions(ranks: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    if not ranks:
        yield []
        return
    first, rest = ranks[0], ranks[1:]
    for groups in _all_partitions(rest):
        yield [(first,), *groups]
        for i, group in enumerate(groups):
            yield [*groups[:i], (first, *group), *groups[i + 1 :]]


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if not number % d]


def _round_numbers(most: int) -> list[int]:
    """Return 2, 3, 4, 6, 8, 12, ... up to `most`."""
    return [
        n
        for n in range(2, most + 1)
        if n & (n - 1) == 0 or (n % 3 == 0 and n // 3 & (n // 3 - 1) == 0)
    ]
