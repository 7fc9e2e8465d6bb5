"""Means over rows, and the rows that belong together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hexiseq_triton.planner.reproduction.experiments import Named
from hexiseq_triton.planner.reproduction.rows import Row


@dataclass(frozen=True)
class Speedups:
    """Speed-ups over the paper's baselines, of the rows that have one.

    Attributes:
        cells: how many these are.
        geometric, arithmetic: means.
        most: the row of the largest.
        bound: the geometric mean of the bounds.
    """

    cells: int
    geometric: float
    arithmetic: float
    most: Row
    bound: float

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Speedups | None:
        """Return the statistics; None if no row has a speed-up."""
        found = [row for row in rows if row.speedup_paper is not None]
        if not found:
            return None
        speedups = [row.speedup_paper or math.nan for row in found]
        return cls(
            len(found),
            geometric_mean(speedups),
            sum(speedups) / len(speedups),
            max(found, key=lambda row: row.speedup_paper or math.nan),
            geometric_mean([row.bound_paper or math.nan for row in found]),
        )


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))


def rows_of(named: Named, rows: Iterable[Row]) -> list[Row]:
    """Return the rows of an experiment."""
    return [row for row in rows if row.experiment.split(":")[0] == named.name]


def main_rows(named: Named, rows: Iterable[Row], mode: str | None) -> list[Row]:
    """Return the rows of an experiment in one mode, those of its sweep left out."""
    names = (named.name, *(f"{named.name}: {cluster}" for cluster in named.clusters))
    return [row for row in rows if row.experiment in names and row.mode == mode]


def swept_rows(named: Named, rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return the rows of the experiment's sweep, by what differs."""
    return {
        name: [row for row in rows if row.experiment == f"{named.name}: {name}"]
        for name in named.swept
    }


def share_reached(row: Row) -> float | None:
    """Return the lower bound over our step: the share of the most possible speed."""
    if row.speedup_any is None or row.bound_any is None:
        return None
    return row.speedup_any / row.bound_any
