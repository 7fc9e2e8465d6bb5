"""How many replicas, how many sequences each, and which ranks: candidates, best bound first.

The sequences of a pass are cut into parts, one a replica. Pieces of nodes, whole nodes first and
single ranks last, then go to the replica that lacks most speed for its part, fastest pieces first.
Replicas of one GPU model each come about where their speeds suit whole sequences.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from hexiseq_triton.planner.fsdp import fsdp_seconds
from hexiseq_triton.planner.groupings import Nodes
from hexiseq_triton.planner.problem import Problem
from hexiseq_triton.planner.speeds import ATTENTION_BACKWARD, ATTENTION_FORWARD, HEADS
from hexiseq_triton.planner.stages import Splitter

_FEW_RANKS = 4
"""Up to so many ranks, all ways of giving them to replicas are tried, idle ones included."""
_FEW_SEQUENCES = 8
"""Up to so many sequences a pass, all ways of cutting them into replicas are tried."""


@dataclass(frozen=True)
class Pool:
    """The ranks of one replica, node by node, and its sequences a pass."""

    nodes: tuple[tuple[int, ...], ...]
    sequences: int

    @property
    def ranks(self) -> list[int]:
        return [rank for node in self.nodes for rank in node]

    def make(self, kind: list[int]) -> tuple[object, ...]:
        """Return what it is made of; pools of equal make have the same best layout."""
        return tuple(tuple([kind[r] for r in node]) for node in self.nodes), self.sequences


@dataclass(frozen=True)
class Allotment:
    """Which ranks and sequences each replica gets, and seconds no layout of it can fall below."""

    accumulation: int
    pools: tuple[Pool, ...]
    seconds: float


def allotments(problem: Problem, splitter: Splitter) -> list[Allotment]:
    """Return candidates whose memory may suffice, best bound first; if none, the roomiest.

    Single replicas may leave slow nodes idle. Bounds within a percent count as equal: then large
    pieces of nodes come before small ones, replicas of equally many sequences before others, and
    most replicas first, since fewer tokens travel in them.
    """
    workload = problem.workload
    nodes = list(problem.cluster.ranks_by_node.values())
    fluid = _Fluid(problem, splitter)
    found: dict[object, Allotment] = {}
    for accumulation in workload.accumulations:
        for parts in _cuts(workload.global_batch // accumulation, problem.cluster.world_size):
            for given in _dealt_ways(parts, nodes, splitter):
                seconds = accumulation * fluid.seconds(parts, given)
                pools = tuple(
                    Pool(_by_node(ranks, splitter.node), part)
                    for ranks, part in zip(given, parts, strict=True)
                )
                make = (accumulation, tuple(pool.make(splitter.kind) for pool in pools))
                found.setdefault(make, Allotment(accumulation, pools, seconds))
    fitting = [a for a in found.values() if a.seconds < float("inf")]
    if not fitting:
        return [max(found.values(), key=lambda a: (a.accumulation, -len(a.pools)))]
    return _best_first(fitting)


def _best_first(fitting: list[Allotment]) -> list[Allotment]:
    """Sort by percents of the bound, cuts through nodes, unequal replicas, and then replicas."""
    least = min(allotment.seconds for allotment in fitting)
    coarser: Counter[object] = Counter()
    entries = []
    for place, allotment in enumerate(fitting):
        percent = int(math.log(allotment.seconds / least) / 0.01)
        parts = tuple(pool.sequences for pool in allotment.pools)
        cut = allotment.accumulation, parts, percent
        entries.append((percent, coarser[cut], len(set(parts)), -len(parts), place))
        coarser[cut] += 1
    return [fitting[place] for *_, place in sorted(entries)]


class _Fluid:
    """Seconds of a pass that no layout of given replicas can fall below; inf if none fits."""

    def __init__(self, problem: Problem, splitter: Splitter) -> None:
        speeds = splitter.speeds
        self.layers, self.seq_len = problem.model.layers, problem.workload.seq_len
        self.rates = 1 / speeds.by_rank[:, : ATTENTION_BACKWARD + 1]
        self.heads = speeds.shared[HEADS]
        self.room = splitter.room_for_tokens
        gather, reduce_scatter = fsdp_seconds(problem)
        self.floor = 2 * gather + reduce_scatter

    def seconds(self, parts: tuple[int, ...], given: list[list[int]]) -> float:
        layer = self.floor
        for part, ranks in zip(parts, given, strict=True):
            tokens = part * self.seq_len
            if self.room(ranks, alone=True) < tokens:
                return float("inf")
            phases = 1 / self.rates[ranks].sum(axis=0)
            linear, attention = phases[:ATTENTION_FORWARD], phases[ATTENTION_FORWARD:]
            layer = max(layer, tokens * (linear.sum() + self.heads * attention.sum()))
        return float(self.layers * layer)


def _cuts(sequences: int, world: int) -> Iterator[tuple[int, ...]]:
    """Yield ways to cut sequences into replicas, most sequences first in each."""
    if sequences <= _FEW_SEQUENCES:
        yield from (cut for cut in _integer_partitions(sequences, sequences) if len(cut) <= world)
        return
    for count in range(1, min(sequences, world) + 1):
        if sequences % count == 0 or count & (count - 1) == 0:
            each, more = divmod(sequences, count)
            yield (each + 1,) * more + (each,) * (count - more)


def _integer_partitions(total: int, most: int) -> Iterator[tuple[int, ...]]:
    if not total:
        yield ()
    for first in range(min(total, most), 0, -1):
        for rest in _integer_partitions(total - first, first):
            yield (first, *rest)


def _dealt_ways(
    parts: tuple[int, ...], nodes: Nodes, splitter: Splitter
) -> Iterator[list[list[int]]]:
    """Yield ways to give the ranks to replicas, by the size of the pieces that stay together."""
    ranks = [rank for node in nodes for rank in node]
    if len(ranks) <= _FEW_RANKS:
        yield from _all_ways(parts, ranks)
        return
    if len(parts) == 1:
        yield from _fastest(nodes, splitter.alone)
        return
    for size in _halves(max(len(node) for node in nodes)):
        pieces = [node[at : at + size] for node in nodes for at in range(0, len(node), size)]
        if len(pieces) >= len(parts):
            yield _dealt(parts, pieces, splitter.alone)


def _all_ways(parts: tuple[int, ...], ranks: list[int]) -> Iterator[list[list[int]]]:
    """Yield every way to give ranks to replicas, or to leave them idle."""
    for takers in product(range(len(parts) + 1), repeat=len(ranks)):
        given: list[list[int]] = [[] for _ in range(len(parts) + 1)]
        for rank, taker in zip(ranks, takers, strict=True):
            given[taker].append(rank)
        if all(given[:-1]):
            yield given[:-1]


def _fastest(nodes: Nodes, alone: list[float]) -> Iterator[list[list[int]]]:
    """Yield all ranks, and the nodes that are fastest: a half of them, a quarter, ..., one."""
    fastest_first = sorted(nodes, key=lambda node: (-sum(alone[r] for r in node), node))
    for count in _halves(len(nodes)):
        yield [sorted(rank for node in fastest_first[:count] for rank in node)]


def _halves(size: int) -> list[int]:
    sizes = [size]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


def _dealt(
    parts: tuple[int, ...], pieces: list[tuple[int, ...]], alone: list[float]
) -> list[list[int]]:
    """Give each piece to the replica that lacks most speed for its part; every one gets a piece."""
    fastest_first = sorted((-sum(alone[r] for r in piece), piece) for piece in pieces)
    total = -sum(rate for rate, _ in fastest_first)
    given: list[list[int]] = [[] for _ in parts]
    lacking = [(-total * part / sum(parts), d) for d, part in enumerate(parts)]
    heapq.heapify(lacking)
    empty = set(range(len(parts)))
    for at, (rate, piece) in enumerate(fastest_first):
        if len(empty) == len(pieces) - at:
            lacking = sorted(entry for entry in lacking if entry[1] in empty)
        lack, d = lacking[0]
        heapq.heapreplace(lacking, (lack - rate, d))
        given[d].extend(piece)
        empty.discard(d)
    return [sorted(ranks) for ranks in given]


def _by_node(ranks: list[int], node: list[int]) -> tuple[tuple[int, ...], ...]:
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(node[rank], []).append(rank)
    return tuple(tuple(together) for together in nodes.values())
