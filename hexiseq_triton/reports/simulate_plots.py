"""Plots of a simulated step, as matplotlib figures: who does what when, where the time goes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from hexiseq_triton.planner.rates import Floats
from hexiseq_triton.planner.simulator import Section, Simulation
from hexiseq_triton.planner.simulator.graph import ALL_TO_ALL, FSDP, GRADIENTS, KEYS, KINDS
from hexiseq_triton.planner.simulator.occupancy import computing_ops, moved_by

_WIDTH = 10.0
_PALETTE = colormaps["tab10"].colors  # type: ignore[attr-defined]
_LANES = {KEYS: 1, GRADIENTS: 1, ALL_TO_ALL: 2, FSDP: 2}
"""Which third of a rank's row each kind of transfer takes; computing takes the first."""


def gantt(simulation: Simulation) -> Figure:
    """Draw one layer, forward and backward: ranks below each other, and what each does when.

    A rank's row has computing on top, below it its exchange of keys, and collectives.
    """
    world = simulation.cost.problem.cluster.world_size
    figure = _figure(min(12.0, 2.5 + 0.25 * world))
    parts = [simulation.sections[name] for name in ("forward", "backward")]
    axes = figure.subplots(1, 2, sharey=True, width_ratios=[max(p.seconds, 1e-12) for p in parts])
    shown: set[int] = set()
    for each, part in zip(axes, parts, strict=True):
        shown |= _rows(each, part)
        each.set_title(f"{part.name}, {part.repeats} in a step", fontsize="medium")
        each.set_xlabel("milliseconds")
    axes[0].set_ylabel("rank")
    figure.legend(
        handles=[Patch(color=_PALETTE[kind], label=KINDS[kind]) for kind in sorted(shown)],
        loc="outside lower center",
        ncols=max(1, len(shown)),
        frameon=False,
    )
    return figure


def _rows(axes: Axes, part: Section) -> set[int]:
    """Draw a section; return which kinds of operations it has."""
    graph = part.graph
    computing = computing_ops(graph)
    moving, ranks = moved_by(graph, part.world_size)
    ops = np.concatenate([computing, moving])
    rank = np.concatenate([graph.rank[computing], ranks])
    kind = graph.kind[ops]
    lane = np.array([_LANES.get(each, 0) for each in kind.tolist()])
    left, right = part.start[ops] * 1e3, part.stop[ops] * 1e3
    top = rank - 0.45 + 0.3 * lane
    corners = [(left, top), (right, top), (right, top + 0.3), (left, top + 0.3)]
    boxes = np.stack([np.stack(corner, axis=1) for corner in corners], axis=1)
    colours = [_PALETTE[each] for each in kind.tolist()]
    # without a raster, a page of many thousand boxes could not be opened
    axes.add_collection(PolyCollection(list(boxes), facecolors=colours, rasterized=True))
    axes.set_xlim(0, max(float(right.max(initial=0.0)), 1e-9))
    axes.set_ylim(part.world_size - 0.5, -0.5)
    return set(kind.tolist())


def time_by_phase(simulation: Simulation) -> Figure:
    """Draw each rank's step: computing and exposed transfers of each section, and idle time."""
    figure = _figure(3.5)
    axes = figure.subplots()
    bottom = np.zeros(simulation.cost.problem.cluster.world_size)
    parts: list[tuple[str, Floats]] = []
    for name, part in simulation.sections.items():
        parts.append((name, part.repeats * part.computing))
    parts.append(("transfers, exposed", simulation.exposed_seconds))
    parts.append(("idle", simulation.idle_seconds))
    edges = np.linspace(-0.5, len(bottom) - 0.5, len(bottom) + 1)
    for index, (name, seconds) in enumerate(parts):
        if seconds.max() > 0:
            top = bottom + seconds
            colour = _PALETTE[index % len(_PALETTE)]
            axes.stairs(top, edges, baseline=bottom, fill=True, color=colour, label=name)
            bottom = top
    axes.margins(x=0)
    axes.set_xlabel("rank")
    axes.set_ylabel("seconds of one step")
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize="small")
    return figure


def throughput(simulations: Sequence[Simulation]) -> Figure:
    """Draw tokens per second against length; lengths that don't fit in memory are hollow."""
    figure = _figure(3.5)
    axes = figure.subplots()
    lengths = np.array([each.cost.problem.workload.seq_len for each in simulations])
    rates = np.array([each.tokens_per_s for each in simulations])
    fits = np.array(
        [bool((each.memory_bytes <= each.cost.memory_limit).all()) for each in simulations]
    )
    axes.plot(lengths, rates, color="C0", linewidth=1)
    for kept, face, label in ((fits, "C0", "fits in memory"), (~fits, "white", "does not fit")):
        if kept.any():
            axes.plot(
                lengths[kept], rates[kept], "o", color="C0", markerfacecolor=face, label=label
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of a sequence")
    axes.set_ylabel("tokens per second")
    axes.legend(frameon=False)
    return figure


def png(figure: Figure) -> bytes:
    """Return a figure as a PNG file."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=130, metadata={"Software": None})
    return content.getvalue()


def save_plots(folder: str | Path, figures: dict[str, Figure]) -> list[Path]:
    """Write figures as PNG files into a folder; return their paths."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in figures.items():
        paths.append(Path(folder) / f"{name}.png")
        paths[-1].write_bytes(png(figure))
    return paths


def _figure(height: float) -> Figure:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
