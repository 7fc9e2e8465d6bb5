"""Seconds of planning: from parsed files to a checked plan, with all baselines and the bound."""

from __future__ import annotations

import statistics
import time

from hexiseq_triton.errors import InfeasibleError
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.reproduction.cells import Cell
from hexiseq_triton.planner.reproduction.rows import Row
from hexiseq_triton.planner.solve import plan

_TIMES = 3


def planning_time(cell: Cell) -> list[Row]:
    """Return one row, `ours` in seconds by the clock: the median after one call to warm up."""
    try:
        seconds = [_seconds(cell) for _ in range(1 + _TIMES)][1:]
    except InfeasibleError as error:
        notes = {"reasons": {"ours": str(error)}}
        return [Row(cell.experiment, cell.model, cell.seq_len, None, None, notes=notes)]
    return [
        Row(
            cell.experiment,
            cell.model,
            cell.seq_len,
            None,
            statistics.median(clock for clock, _ in seconds),
            paper=cell.paper,
            notes={
                "gpus": cell.cluster.world_size,
                "cpu_seconds": statistics.median(cpu for _, cpu in seconds),
            },
        )
    ]


def _seconds(cell: Cell) -> tuple[float, float]:
    """Return seconds of planning once, by the clock and of this process."""
    clock, cpu = time.perf_counter(), time.process_time()
    plan(
        cell.cluster,
        ModelSpec.load(cell.model),
        seq_len=cell.seq_len,
        global_batch=cell.global_batch,
    )
    return time.perf_counter() - clock, time.process_time() - cpu
