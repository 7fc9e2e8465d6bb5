"""The fast engine: operations in their order, each as soon as it can.

A transfer between two ranks waits until its ports are done with those before it in the order; it
then takes as long as its slowest port, and occupies each port for that port's own seconds. A
collective shares ports with others at no cost; a section still lasts as long as its fullest port is
at work (`occupancy.fullest_port_seconds`). Where no two transfers want a port at the same time,
this is exact, and `fair_sharing` finds the same.
"""

from __future__ import annotations

import numba
import numpy as np

from hexiseq_triton.planner.rates import Floats
from hexiseq_triton.planner.simulator.graph import Graph
from hexiseq_triton.planner.simulator.links import Narrow


def longest_path(graph: Graph) -> tuple[Floats, Floats]:
    """Return when each operation starts and stops, in seconds from the section's start."""
    start, stop = _longest_path(
        graph.seconds,
        graph.peer,
        graph.dep_starts,
        graph.deps,
        graph.use_starts,
        graph.use_port,
        graph.use_seconds,
        graph.num_ports,
    )
    return start, stop


@numba.njit(cache=True)
def _longest_path(
    seconds: Floats,
    peer: Narrow,
    dep_starts: Narrow,
    deps: Narrow,
    use_starts: Narrow,
    use_port: Narrow,
    use_seconds: Floats,
    num_ports: int,
) -> tuple[Floats, Floats]:
    count = len(seconds)
    start, stop = np.zeros(count), np.zeros(count)
    free = np.zeros(num_ports)
    for i in range(count):
        begin = 0.0
        for d in range(dep_starts[i], dep_starts[i + 1]):
            begin = max(begin, stop[deps[d]])
        start[i] = begin
        begin += seconds[i]
        length = 0.0
        queued = peer[i] >= 0
        for u in range(use_starts[i], use_starts[i + 1]):
            length = max(length, use_seconds[u])
            if queued:
                begin = max(begin, free[use_port[u]])
        if queued:
            for u in range(use_starts[i], use_starts[i + 1]):
                free[use_port[u]] = begin + use_seconds[u]
        stop[i] = begin + length
    return start, stop
