"""What the reproduction is held against, with the least or largest figure of each check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hexiseq_triton.planner.reproduction.experiments import Named
from hexiseq_triton.planner.reproduction.rows import Row
from hexiseq_triton.planner.reproduction.statistics import main_rows, rows_of, share_reached

LEAST_SHARE = 0.90
LEAST_PARITY = 0.97


@dataclass(frozen=True)
class Check:
    """Something that should hold of all rows of some experiments."""

    asked: str
    of: int
    """Rows it was looked at in."""
    missed: tuple[str, ...]
    least: float

    def __str__(self) -> str:
        found = f"least {self.least:.4g} of {self.of}"
        if self.missed:
            found += f"; missed by {len(self.missed)}: {', '.join(self.missed)}"
        return f"{self.asked}: {'missed' if self.missed else 'held'} ({found})"


def checks(named: Sequence[Named], rows: Sequence[Row]) -> list[Check]:
    """Return the checks that apply to the experiments, in the first mode unless they say more."""
    compute_bound = [
        (row, share_reached(row) or 0.0)
        for each in named
        if each.experiment.group == "simulations"
        for row in main_rows(each, rows, each.experiment.modes[0])
        if row.notes.get("compute_bound") and row.speedup_paper is not None
    ]
    first, others = (
        [
            (row, row.speedup_any)
            for each in named
            if each.experiment.kind == "comparison"
            for row in rows_of(each, rows)
            if row.speedup_any is not None and (row.mode == each.experiment.modes[0]) == in_first
        ]
        for in_first in (True, False)
    )
    parity = [
        (row, row.speedup_any or 0.0)
        for each in named
        if each.experiment.kind == "parity" and each.experiment.group == "alike"
        for row in main_rows(each, rows, each.experiment.modes[0])
    ]
    asked = (
        (
            f"simulations, compute-bound: speed-up / bound >= {LEAST_SHARE:g}",
            compute_bound,
            LEAST_SHARE,
        ),
        ("speed-up over any baseline >= 1", first, 1.0),
        ("the same in the other modes, which baselines with two rings keep out of", others, 1.0),
        (f"FLOP-matched: ours / best homogeneous >= {LEAST_PARITY:g}", parity, LEAST_PARITY),
    )
    return [_check(text, found, least) for text, found, least in asked if found]


def _check(asked: str, found: Sequence[tuple[Row, float]], least: float) -> Check:
    missed = (
        f"{row.experiment} {row.model} {row.seq_len // 1024}K {row.mode}"
        for row, value in found
        if value < least
    )
    return Check(asked, len(found), tuple(missed), min(value for _, value in found))
