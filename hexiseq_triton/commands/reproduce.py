"""`hexiseq reproduce`: the papers' evaluation in the simulator, as rows, plots and a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hexiseq_triton.commands.options import file_to_make, folder_to_write
from hexiseq_triton.errors import ConfigError
from hexiseq_triton.planner.reproduction.checks import checks
from hexiseq_triton.planner.reproduction.experiments import Named, load_experiments
from hexiseq_triton.reports.terminal import print_line, print_table, terminal
from hexiseq_triton.wording import counted

if TYPE_CHECKING:
    from hexiseq_triton.planner.reproduction.runner import Result

FILE_WIDTH = 160
"""Columns of what goes to a file or another program."""
CELLS, SUMMARY = "cells.jsonl", "summary.json"


def reproduce_command(
    only: Annotated[
        str | None, typer.Option(help="experiments to compute, with commas: S2,P4")
    ] = None,
    experiments: Annotated[
        Path, typer.Option(help="folder with a YAML file for each experiment")
    ] = Path("bench/experiments"),
    out: Annotated[
        Path,
        typer.Option(help="folder for results, summary and plots", callback=folder_to_write),
    ] = Path("bench/results/reproduction"),
    page: Annotated[
        Path, typer.Option(help="where the page is written", callback=file_to_make)
    ] = Path("docs/reproduction.md"),
    jobs: Annotated[int, typer.Option(help="processes side by side")] = 2,
    fresh: Annotated[bool, typer.Option("--fresh", help="compute again what is known")] = False,
) -> None:
    """Compute the papers' experiments with the simulator; cells that are known are kept."""
    if jobs < 1:
        raise ConfigError(f"--jobs is {jobs}; it is a number of processes, from 1")
    named = load_experiments(experiments)
    wanted = load_experiments(experiments, only.split(",")) if only else named
    results = _computed(named, wanted, out / CELLS, jobs, fresh)
    _write(named, results, out, page)
    _print(wanted, results)


def _computed(
    named: Sequence[Named], wanted: Sequence[Named], path: Path, jobs: int, fresh: bool
) -> list[Result]:
    """Compute what is missing of the wanted experiments; return the results of all."""
    from hexiseq_triton.planner.reproduction.cells import cells_of  # numba is slow to import
    from hexiseq_triton.planner.reproduction.runner import Results, compute

    results = Results.load(path)
    cells = [cell for each in wanted for cell in cells_of(each)]
    if fresh:
        results.forget(cells)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    ) as progress:
        task = progress.add_task("cells", total=len(cells))
        for cell in compute(cells, results, jobs):
            progress.update(task, advance=1, description=cell.title)
    every_cell = [cell for each in named for cell in cells_of(each)]
    results.keep_only(every_cell)
    return results.of(every_cell)


def _write(named: Sequence[Named], results: Sequence[Result], out: Path, page: Path) -> None:
    # matplotlib is slow to import
    from hexiseq_triton.reports.reproduction.page import page as text_of
    from hexiseq_triton.reports.reproduction.plots import figures
    from hexiseq_triton.reports.simulate_plots import save_plots

    rows = [row for result in results for row in result.rows]
    lines = ",\n".join(json.dumps(row.summary) for row in rows)
    (out / SUMMARY).write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    save_plots(out, dict(figures(named, rows)))
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text_of(named, results), encoding="utf-8")


def _print(named: Sequence[Named], results: Sequence[Result]) -> None:
    """Print the rows of some experiments, what is asked of them, and what may be out of date."""
    from hexiseq_triton.planner.reproduction.cells import code_digest
    from hexiseq_triton.reports.reproduction.terminal import rows_table

    names = {each.name for each in named}
    rows = [row for result in results for row in result.rows]
    shown = [row for row in rows if row.experiment.split(":")[0] in names]
    console = terminal(FILE_WIDTH)
    print_table(rows_table(shown), console)
    for check in checks(named, shown):
        print_line(str(check), console)
    older = sum(result.code != code_digest() for result in results)
    if older:
        print_line(
            f"{counted(older, 'cell')} computed by other planner sources; --fresh does them again",
            console,
        )
