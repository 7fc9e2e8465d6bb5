"""A comparison of plans on the terminal: phases of each, and the order they came in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from hexiseq_triton.tracing.phases import PHASES
from hexiseq_triton.tracing.record import RecordedRun

CLOSE = 0.05
"""Plans whose measured steps are nearer than this have no order worth speaking of."""


def comparison_table(names: Sequence[str], runs: Sequence[RecordedRun]) -> Table:
    """Return a table with a column a plan: each phase's mean over the ranks, and the step.

    A cell is measured / predicted, or measured alone where nothing was predicted.
    """
    emulated = any(label for run in runs for label in run.emulated)
    predicted = any(run.predicted_step_seconds is not None for run in runs)
    title = "seconds of a step, mean of the ranks" + (", emulated ranks" if emulated else "")
    title += ": measured / predicted" if predicted else ""
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("phase")
    for name in names:
        table.add_column(name, justify="right")
    for phase in PHASES:
        table.add_row(phase, *(_cell(run, phase) for run in runs))
    steps = (_pair(run.step_seconds, run.predicted_step_seconds) for run in runs)
    table.add_row("step", *steps)
    return table


def _cell(run: RecordedRun, phase: str) -> str:
    measured = sum(phases[phase] for phases in run.measured) / run.world_size
    if not run.predicted:
        return f"{measured:.3g}"
    shares = run.visible_share if phase == "attention" else (1.0,) * run.world_size
    expected = sum(p[phase] * share for p, share in zip(run.predicted, shares, strict=True))
    return _pair(measured, expected / run.world_size)


def _pair(measured: float, expected: float | None) -> str:
    return f"{measured:.3g}" if expected is None else f"{measured:.3g} / {expected:.3g}"


def order_lines(names: Sequence[str], runs: Sequence[RecordedRun]) -> Iterator[str]:
    """Yield the measured order, and each pair that the prediction puts the other way round."""
    order = sorted(range(len(runs)), key=lambda i: runs[i].step_seconds)
    best = runs[order[0]].step_seconds
    times = (f"{names[i]} ({runs[i].step_seconds / best:.2f})" for i in order)
    yield f"measured, fastest first: {', '.join(times)}"
    if any(run.predicted_step_seconds is None for run in runs):
        return
    wrong = [
        (names[a], names[b])
        for place, a in enumerate(order)
        for b in order[place + 1 :]
        if runs[b].step_seconds > runs[a].step_seconds * (1 + CLOSE)
        and (runs[a].predicted_step_seconds or 0) > (runs[b].predicted_step_seconds or 0)
    ]
    if not wrong:
        yield f"the prediction puts all pairs that are more than {CLOSE:.0%} apart in this order"
    for first, second in wrong:
        yield f"warning: {first} was faster than {second}; predicted the other way round"
