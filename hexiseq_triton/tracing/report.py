"""A recorded run on the terminal: where the time went, beside what was predicted, and warnings."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from hexiseq_triton.reports.terminal import print_line, print_table
from hexiseq_triton.tracing.phases import COMMUNICATION, COMPUTING, PHASES
from hexiseq_triton.tracing.record import RecordedRun
from hexiseq_triton.wording import counted, span

TOLERANCE = 0.15
"""A rank's computing, or the step, further from its prediction than this is warned of."""
LEAST_SHARE = 0.02
"""A difference below this share of the step is not worth a warning."""
RANKS_A_TABLE = 5


def print_recorded(run: RecordedRun, console: Console, profile_command: str) -> None:
    """Print the tables of a run, and a warning for each prediction that was far off."""
    print_table(timeline_table(run), console)
    if run.predicted:
        for table in phases_tables(run):
            print_table(table, console)
    found = list(warnings(run))
    again = [f"measure the cluster again, and plan anew: {profile_command}"] if found else []
    for line in (*notes(run), *found, *again):
        print_line(line, console)


def timeline_table(run: RecordedRun) -> Table:
    """Return each rank's computing, exposed communication and idle time in one step."""
    table = _table(f"seconds of a step, {counted(run.steps, 'step')} measured{_emulated(run)}")
    for name in ("rank", "computing", "exposed communication", "idle", "step"):
        table.add_column(name, justify="right")
    for rank, phases in enumerate(run.measured):
        parts = (
            sum(phases[name] for name in COMPUTING),
            sum(phases[name] for name in COMMUNICATION),
            phases["idle"],
        )
        step = sum(phases.values())
        shares = (f"{seconds:.4g} ({seconds / step:.0%})" for seconds in parts)
        table.add_row(str(rank), *shares, f"{step:.4g}")
    return table


def phases_tables(run: RecordedRun) -> Iterator[Table]:
    """Yield tables of measured seconds of each phase beside the predicted ones, a column a rank."""
    for start in range(0, run.world_size, RANKS_A_TABLE):
        ranks = range(start, min(start + RANKS_A_TABLE, run.world_size))
        table = _table("seconds of a step: measured / predicted")
        table.add_column("phase")
        for rank in ranks:
            table.add_column(f"rank {rank}", justify="right")
        for name in PHASES:
            cells = (f"{run.measured[r][name]:.3g} / {_expected(run, r)[name]:.3g}" for r in ranks)
            table.add_row(name, *cells)
        yield table


def notes(run: RecordedRun) -> Iterator[str]:
    """Yield what a reader should know of the comparison."""
    for rank, label in enumerate(run.emulated):
        if label:
            yield f"rank {rank} was {label}"
    yield "; ".join(dict.fromkeys(run.paths))
    if run.predicted_step_seconds is not None:
        yield (
            f"step: {run.step_seconds:.4g} s measured, {run.predicted_step_seconds:.4g} s predicted"
            + ("" if run.as_planned else " for whole sequences")
        )
    if not run.as_planned:
        least, most = min(run.visible_share), max(run.visible_share)
        yield (
            f"the batches are packed documents with {span(least, most, '.1%')} of the "
            "pairs of whole sequences; attention is compared with its prediction times that share"
        )


def warnings(run: RecordedRun) -> Iterator[str]:
    """Yield a warning for each rank whose computing is far from its prediction, or for the step.

    Where all computing is as predicted and the step is not, what ranks wait for differs.
    """
    found = False
    for rank, phases in enumerate(run.measured):
        far = [
            f"{name} took {measured:.4g} s, {_difference(measured, expected)} predicted"
            for name, measured, expected in _comparisons(run, rank)
            if abs(measured - expected) > TOLERANCE * expected
            and abs(measured - expected) > LEAST_SHARE * sum(phases.values())
        ]
        if far:
            found = True
            yield f"warning: rank {rank} ({run.devices[rank]}): {'; '.join(far)}"
    expected_step = run.predicted_step_seconds
    if found or expected_step is None or not run.as_planned:
        return
    if abs(run.step_seconds - expected_step) > TOLERANCE * expected_step:
        slowest = max(range(run.world_size), key=lambda rank: _computing(run, rank))
        yield (
            f"warning: the step took {run.step_seconds:.4g} s, "
            f"{_difference(run.step_seconds, expected_step)} predicted, though every rank's "
            f"computing is as predicted (rank {slowest} computes longest): transfers differ"
        )


def _comparisons(run: RecordedRun, rank: int) -> Iterator[tuple[str, float, float]]:
    """Yield name, measured and predicted seconds of what a rank computes."""
    if run.predicted:
        expected = _expected(run, rank)
        for name in COMPUTING:
            if expected[name] > 0:
                yield name, run.measured[rank][name], expected[name]
    elif run.as_planned and run.predicted_computing and run.predicted_computing[rank]:
        yield "computing", _computing(run, rank), run.predicted_computing[rank] or 0.0


def _expected(run: RecordedRun, rank: int) -> dict[str, float]:
    """Return predicted phases, with attention for the pairs that the batches have."""
    phases = run.predicted[rank]
    return phases | {"attention": phases["attention"] * run.visible_share[rank]}


def _computing(run: RecordedRun, rank: int) -> float:
    return sum(run.measured[rank][name] for name in COMPUTING)


def _difference(measured: float, expected: float) -> str:
    ratio = measured / expected
    if ratio > 2:
        return f"{ratio:.3g} times what was"
    return f"{abs(ratio - 1):.0%} {'more' if ratio > 1 else 'less'} than"


def _emulated(run: RecordedRun) -> str:
    return ", emulated ranks" if any(run.emulated) else ""


def _table(title: str) -> Table:
    return Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
