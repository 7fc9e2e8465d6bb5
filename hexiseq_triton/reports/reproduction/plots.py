"""Plots of the reproduction: speed-ups under their bounds, sweeps, ablations, planning time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hexiseq_triton.planner.reproduction.experiments import Named
from hexiseq_triton.planner.reproduction.rows import Row
from hexiseq_triton.planner.reproduction.statistics import main_rows, rows_of, swept_rows
from hexiseq_triton.reports.reproduction.markdown import length

_WIDTH = 10.0


def figures(named: Sequence[Named], rows: Sequence[Row]) -> Iterator[tuple[str, Figure]]:
    """Yield the plots for which there are rows, by the names of their files."""
    comparisons = [e for e in named if e.experiment.kind == "comparison" and rows_of(e, rows)]
    if comparisons:
        yield "speedups", speedups(comparisons, rows)
    swept = [each for each in comparisons if any(swept_rows(each, rows).values())]
    if swept:
        yield "sweeps", sweeps(swept, rows)
    for kind, draw in (("ablation", ablations), ("planning_time", planning)):
        found = [row for e in named if e.experiment.kind == kind for row in rows_of(e, rows)]
        if found:
            yield kind, draw(found)


def speedups(named: Sequence[Named], rows: Sequence[Row]) -> Figure:
    """Draw each experiment's speed-ups over the paper's baselines, and above them the bound."""
    figure, axes = _figure(3.5, len(named))
    for each, ax in zip(named, axes, strict=True):
        lengths = sorted(each.experiment.seq_lens)
        found = main_rows(each, rows, each.experiment.modes[0])
        for place, model in enumerate(each.experiment.models):
            colour = f"C{place}"
            mine = [row for row in found if row.model == model and row.speedup_paper is not None]
            at = [lengths.index(row.seq_len) for row in mine]
            ours, bounds, paper = (
                [getattr(row, name) or np.nan for row in mine]
                for name in ("speedup_paper", "bound_paper", "paper")
            )
            ax.plot(at, ours, "o-", color=colour, label=model, markersize=4)
            ax.plot(at, bounds, "_", color=colour, markersize=9)
            ax.plot(at, paper, "*", color=colour, markersize=8)
        ax.axhline(1.0, color="grey", linewidth=0.5)
        ax.set_xticks(range(len(lengths)), map(length, lengths), rotation=90, fontsize="x-small")
        ax.set_title(each.name, fontsize="medium")
        ax.legend(frameon=False, fontsize="x-small")
    axes[0].set_ylabel("speed-up; dashes: bound, stars: paper")
    return figure


def sweeps(named: Sequence[Named], rows: Sequence[Row]) -> Figure:
    """Draw what other counts of GPUs, and other rates, do to the speed-ups."""
    changes = [
        (f"{each.name}: {change}", found)
        for each in named
        for change, found in swept_rows(each, rows).items()
    ]
    models = list(dict.fromkeys(row.model for _, found in changes for row in found))
    figure, (ax,) = _figure(1.0 + 0.2 * len(changes), 1)
    for place, (_, found) in enumerate(changes):
        for row in found:
            if row.speedup_paper is not None and row.bound_paper is not None:
                colour = f"C{models.index(row.model)}"
                ax.plot(row.speedup_paper, place, "o", color=colour, markersize=4)
                ax.plot(row.bound_paper, place, "|", color=colour, markersize=8)
    for place, model in enumerate(models):
        ax.plot([], [], "o", color=f"C{place}", label=model)
    ax.set_yticks(range(len(changes)), [name for name, _ in changes], fontsize="x-small")
    ax.invert_yaxis()
    ax.set_xlabel("speed-up over the paper's baselines; bars: bound")
    ax.legend(frameon=False, fontsize="small")
    return figure


def ablations(rows: Sequence[Row]) -> Figure:
    """Draw each ablation's speed as a share of everything's; layouts that don't fit are hollow."""
    names = list(dict.fromkeys(row.experiment.split(": ")[-1] for row in rows))
    whole = {_place(row): row.ours for row in rows if row.experiment.endswith(": all")}
    figure, (ax,) = _figure(1.0 + 0.35 * len(names), 1)
    for place, (cell, everything) in enumerate(whole.items()):
        colour = f"C{place}"
        for row in rows:
            if _place(row) == cell and row.ours and everything:
                at = names.index(row.experiment.split(": ")[-1])
                ax.plot(
                    row.ours / everything,
                    at + (place - len(whole) / 2) * 0.08,
                    "o",
                    color=colour,
                    markerfacecolor=colour if row.notes["fits"] else "white",
                    markersize=5,
                )
        ax.plot([], [], "o", color=colour, label=", ".join((*cell[:2], length(cell[2]))))
    ax.set_yticks(range(len(names)), names, fontsize="small")
    ax.invert_yaxis()
    ax.set_xlabel("speed, as a share of the whole search's")
    ax.legend(frameon=False, fontsize="small")
    return figure


def _place(row: Row) -> tuple[str, str, int]:
    """Return cluster, model and length of a row of an ablation."""
    return row.experiment.split(": ")[-2], row.model, row.seq_len


def planning(rows: Sequence[Row]) -> Figure:
    """Draw seconds of planning against GPUs, and the paper's."""
    figure, (ax,) = _figure(3.5, 1)
    timed = [row for row in rows if row.ours is not None]
    for place, model in enumerate(dict.fromkeys(row.model for row in timed)):
        mine = [row for row in timed if row.model == model]
        gpus = [row.notes["gpus"] for row in mine]
        ax.plot(gpus, [row.ours or 0.0 for row in mine], "o-", color=f"C{place}", label=model)
    paper = [(row.notes["gpus"], row.paper) for row in timed if row.paper is not None]
    ax.plot(*np.array(paper).reshape(-1, 2).T, "*", color="black", label="paper")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlabel("GPUs")
    ax.set_ylabel("seconds of planning")
    ax.legend(frameon=False)
    return figure


def _figure(height: float, columns: int) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, sharey=True, squeeze=False)[0]
    return figure, list(axes)
