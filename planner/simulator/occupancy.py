"""What every rank does over a section: it computes, or waits while its bytes move, or idles."""

from __future__ import annotations

import numba
import numpy as np

from hexiseq_triton.planner.rates import Floats, Ints
from hexiseq_triton.planner.rows import sums_by
from hexiseq_triton.planner.simulator.graph import COMPUTING, Graph
from hexiseq_triton.planner.simulator.links import COPY_ENGINE, port_seconds


def computing_seconds(graph: Graph, start: Floats, stop: Floats, world_size: int) -> Floats:
    """Return how long each rank computes."""
    ops = computing_ops(graph)
    return sums_by(graph.rank[ops].astype(np.int64), (stop - start)[ops], world_size)


def exposed_seconds(graph: Graph, start: Floats, stop: Floats, world_size: int) -> Floats:
    """Return how long each rank has bytes under way, its own or others' to it, and computes not."""
    op, rank = moved_by(graph, world_size)
    order = np.lexsort((start[op], rank))
    op, rank = op[order], rank[order]
    computing = computing_ops(graph)
    computing = computing[np.lexsort((start[computing], graph.rank[computing]))]
    return _exposed(
        rank,
        start[op],
        stop[op],
        graph.rank[computing],
        start[computing],
        stop[computing],
        world_size,
    )


def fullest_port_seconds(graph: Graph) -> float:
    """Return how long the fullest port is at work in all: no section can be shorter."""
    return float(port_seconds(graph.use_port, graph.use_seconds, graph.num_ports).max())


def computing_ops(graph: Graph) -> Ints:
    """Return the operations that compute."""
    result: Ints = np.flatnonzero(np.isin(graph.kind, COMPUTING))
    return result


def moved_by(graph: Graph, world_size: int) -> tuple[Ints, Ints]:
    """Return which operation moves bytes through which rank's ports, each pair once."""
    op = np.repeat(np.arange(len(graph)), np.diff(graph.use_starts))
    kept = graph.use_port < COPY_ENGINE * world_size
    rank = graph.use_port[kept].astype(np.int64) % world_size
    pair = np.unique(op[kept] * world_size + rank)
    return pair // world_size, pair % world_size


@numba.njit(cache=True)
def _exposed(
    rank: Ints,
    start: Floats,
    stop: Floats,
    computing_rank: Ints,
    computing_start: Floats,
    computing_stop: Floats,
    world_size: int,
) -> Floats:
    """Return, for each rank, the time in which it moves and doesn't compute; all sorted."""
    exposed = np.zeros(world_size)
    at, reached, last = 0, 0.0, -1
    for i in range(len(rank)):
        if rank[i] != last:
            last, reached = rank[i], 0.0
            while at < len(computing_rank) and computing_rank[at] < last:
                at += 1
        begin = max(reached, start[i])
        if stop[i] <= begin:
            continue
        reached = stop[i]
        exposed[last] += stop[i] - begin
        while at < len(computing_rank) and computing_rank[at] == last:
            if computing_start[at] >= stop[i]:
                break
            overlap = min(stop[i], computing_stop[at]) - max(begin, computing_start[at])
            exposed[last] -= max(0.0, overlap)
            if computing_stop[at] > stop[i]:
                break
            at += 1
    return exposed
