"""What the reproduction prints: a row a cell, means, checks."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from hexiseq_triton.planner.reproduction.rows import Row
from hexiseq_triton.planner.reproduction.statistics import share_reached
from hexiseq_triton.reports.reproduction.markdown import (
    figure,
    length,
    percent,
    rate,
    ratio,
    seconds,
)

_TITLES = ("experiment", "model", "tokens", "mode", "ours", "speed-up, paper's", "bound",
           "speed-up, any", "reached", "paper")  # fmt: skip


def rows_table(rows: Sequence[Row]) -> Table:
    """Return one line a row: ours in tokens/s, or in seconds where planning is timed."""
    table = Table(caption="ours: tokens/s by the simulator; seconds where planning is timed")
    for place, title in enumerate(_TITLES):
        table.add_column(title, justify="left" if place < 4 else "right", no_wrap=place == 0)
    for row in rows:
        timed = "cpu_seconds" in row.notes
        table.add_row(
            row.experiment,
            row.model,
            length(row.seq_len),
            row.mode or "-",
            seconds(row.ours) if timed else rate(row.ours),
            ratio(row.speedup_paper),
            ratio(row.bound_paper),
            ratio(row.speedup_any),
            percent(share_reached(row)),
            figure(row.paper),
        )
    return table
