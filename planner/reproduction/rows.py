"""A row of `summary.json`, and what the page says besides."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

DIGITS = 6


@dataclass(frozen=True)
class Row:
    """One cell in one mode.

    Attributes:
        experiment: its name; with what differs after a colon.
        model: its preset.
        seq_len: tokens of a sequence.
        mode: how keys travel between groups; None where nothing is simulated.
        ours: tokens/s; in kind planning_time, seconds. None where nothing fits.
        baseline_paper: the best of the paper's baselines and its layout; None if all run out of
            memory.
        speedup_paper: ours over it.
        bound_paper: what no plan's speed-up over it exceeds (`planner.bound`).
        baseline_any: the best of all baselines.
        speedup_any: ours over it.
        bound_any: the same bound for it.
        paper: the paper's figure for the cell, where known.
        notes: for the page; not in the summary.
    """

    experiment: str
    model: str
    seq_len: int
    mode: str | None
    ours: float | None
    baseline_paper: str | None = None
    speedup_paper: float | None = None
    bound_paper: float | None = None
    baseline_any: str | None = None
    speedup_any: float | None = None
    bound_any: float | None = None
    paper: float | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def summary(self) -> dict[str, Any]:
        """What stands in `summary.json`."""
        return {name: value for name, value in self.content.items() if name != "notes"}

    @property
    def content(self) -> dict[str, Any]:
        """All fields, floats rounded to `DIGITS` significant digits."""
        content: dict[str, Any] = _rounded(asdict(self))
        return content


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
