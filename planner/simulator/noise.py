"""Seeded noise: jitter on every operation, and ranks that compute more slowly than they should."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hexiseq_triton.planner.simulator.conditions import Conditions
from hexiseq_triton.planner.simulator.graph import COMPUTING, Graph


def disturbed(graph: Graph, conditions: Conditions, key: tuple[int, ...]) -> Graph:
    """Return the graph with other lengths: of one draw of the jitter, and of stragglers.

    Args:
        graph: what would be without.
        conditions: jitter and stragglers.
        key: names the draw; equal keys give equal draws.
    """
    if not conditions.jitter and not conditions.stragglers:
        return graph
    slower = np.ones(len(graph))
    if conditions.jitter:
        spread = conditions.jitter
        noise = np.random.default_rng(key).standard_normal(len(graph))
        slower = np.exp(spread * noise - spread**2 / 2)
    use_seconds = graph.use_seconds * np.repeat(slower, np.diff(graph.use_starts))
    seconds = graph.seconds * slower
    computing = np.isin(graph.kind, COMPUTING)
    for rank, factor in conditions.stragglers.items():
        seconds[computing & (graph.rank == rank)] *= factor
    return replace(graph, seconds=seconds, use_seconds=use_seconds)
