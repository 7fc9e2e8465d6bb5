"""A simulated step as a trace for Perfetto or chrome://tracing: every operation of every rank.

Layers are alike: the trace has one forward and one backward, and says how often each runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hexiseq_triton.planner.simulator.graph import GRADIENTS, KEYS, KINDS, Graph
from hexiseq_triton.planner.simulator.occupancy import computing_ops, moved_by
from hexiseq_triton.planner.simulator.simulation import Section, Simulation

LANES = ("computing", "exchange", "collectives")
COMPUTING, EXCHANGE, COLLECTIVES = range(len(LANES))


def write_trace(path: str | Path, simulation: Simulation) -> None:
    """Write the trace as Chrome's JSON: processes are ranks, threads what goes on beside what."""
    events = [*_names(simulation), *trace_events(simulation)]
    about = {
        "mode": simulation.mode,
        "engine": simulation.engine,
        "step_seconds": simulation.step_seconds,
        "runs of each section in one step": {
            name: part.repeats for name, part in simulation.sections.items()
        },
    }
    content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
    Path(path).write_text(json.dumps(content), encoding="utf-8")


def trace_events(simulation: Simulation) -> Iterator[dict[str, Any]]:
    """Yield one complete event for each operation and rank, section after section."""
    begin = 0.0
    for part in simulation.sections.values():
        ops, ranks = _shown(part)
        graph = part.graph
        for op, rank in zip(ops.tolist(), ranks.tolist(), strict=True):
            start, stop = float(part.start[op]), float(part.stop[op])
            if stop > start:
                yield {
                    "ph": "X",
                    "name": KINDS[graph.kind[op]],
                    "cat": part.name,
                    "pid": rank,
                    "tid": _lane(graph, op),
                    "ts": (begin + start) * 1e6,
                    "dur": (stop - start) * 1e6,
                    "args": _about(graph, op),
                }
        begin += part.length


def _shown(part: Section) -> tuple[Any, Any]:
    """Return operations and on which rank each is shown; transfers stand with their receiver."""
    graph = part.graph
    computing = computing_ops(graph)
    sent = np.flatnonzero(graph.peer >= 0)
    shared, ranks = moved_by(graph, part.world_size)
    together = graph.peer[shared] < 0
    return (
        np.concatenate([computing, sent, shared[together]]),
        np.concatenate([graph.rank[computing], graph.peer[sent], ranks[together]]),
    )


def _lane(graph: Graph, op: int) -> int:
    if graph.use_starts[op] == graph.use_starts[op + 1] and graph.peer[op] < 0:
        return COMPUTING
    return EXCHANGE if graph.kind[op] in (KEYS, GRADIENTS) else COLLECTIVES


def _about(graph: Graph, op: int) -> dict[str, Any]:
    if graph.peer[op] < 0:
        return {"flops": float(graph.flops[op])} if graph.flops[op] else {}
    uses = graph.use_bytes[graph.use_starts[op] : graph.use_starts[op + 1]]
    return {"from rank": int(graph.rank[op]), "bytes": float(uses.max(initial=0.0))}


def _names(simulation: Simulation) -> Iterator[dict[str, Any]]:
    for device in simulation.cost.problem.cluster.devices:
        label = f"rank {device.rank}: {device.gpu}, {device.node}"
        yield {"ph": "M", "name": "process_name", "pid": device.rank, "args": {"name": label}}
        for lane, name in enumerate(LANES):
            yield {
                "ph": "M",
                "name": "thread_name",
                "pid": device.rank,
                "tid": lane,
                "args": {"name": name},
            }
