"""Plots of a plan as SVG text: who holds what, how long each rank works, what memory it needs."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from hexiseq_triton.planner.plans import GroupPlan, Plan
from hexiseq_triton.planner.rates import Floats

_WIDTH = 10.0


def holdings_svg(plan: Plan) -> str:
    """Draw every rank twice: its heads over its group's tokens, and below them its own tokens."""
    figure, (attention, token_wise) = _figure(4.0, height_ratios=(5, 1))
    colours = _colours(plan)
    heads, tokens, fills = [], [], []
    start, starts = 0, []
    for replica in plan.replicas:
        starts.append(start)
        for group in replica.groups:
            heads += _head_boxes(group, start)
            tokens += _token_boxes(group, start)
            fills += [colours[share.gpu] for share in group.ranks]
            start += group.tokens
    for axes, boxes in ((attention, heads), (token_wise, tokens)):
        axes.add_collection(
            PolyCollection(boxes, facecolors=fills, edgecolors="white", linewidths=0.3)
        )
        axes.vlines(starts[1:], 0, plan.num_heads, color="black", linewidth=0.8)
        axes.set_xlim(0, max(start, 1))
    attention.set_ylim(0, plan.num_heads)
    attention.set_ylabel("query heads")
    token_wise.set_ylim(0, 1)
    token_wise.set_yticks([])
    token_wise.set_xlabel("tokens of one pass, group by group; black lines between replicas")
    token_wise.xaxis.set_major_formatter("{x:,.0f}")
    attention.legend(
        handles=[Patch(color=colour, label=gpu or "GPU") for gpu, colour in colours.items()],
        ncols=len(colours),
        loc="lower left",
        bbox_to_anchor=(0, 1),
        frameon=False,
    )
    return _svg(figure, "holdings")


def seconds_svg(plan: Plan, parts: Mapping[str, Floats]) -> str:
    """Draw what each rank does in one step.

    Args:
        plan: for the step's length.
        parts: seconds of each part, by rank; they are stacked.
    """
    figure, (axes,) = _figure(3.0)
    bottom = np.zeros(plan.world_size)
    palette = colormaps["tab10"].colors  # type: ignore[attr-defined]
    for index, (name, seconds) in enumerate(parts.items()):
        top = bottom + seconds
        _fill(axes, bottom, top, palette[index % len(palette)], name)
        bottom = top
    if plan.predicted is not None:
        axes.axhline(plan.predicted.step_seconds, color="black", linewidth=1, label="the step")
    axes.set_ylabel("seconds")
    axes.legend(ncols=4, loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize="small")
    return _svg(figure, "seconds")


def memory_svg(plan: Plan) -> str:
    """Draw what memory each rank needs at its peak, and what it may use; idle ranks stay empty."""
    figure, (axes,) = _figure(2.5)
    used, limit = np.zeros(plan.world_size), np.zeros(plan.world_size)
    for share in plan.shares:
        used[share.rank] = (share.memory_bytes or 0) / 1e9
        limit[share.rank] = (share.memory_limit_bytes or 0) / 1e9
    _fill(axes, np.zeros_like(used), used, "tab:blue", "needed")
    axes.stairs(limit, _edges(plan.world_size), color="black", linewidth=1, label="limit")
    axes.set_ylabel("GB")
    axes.legend(ncols=2, loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize="small")
    return _svg(figure, "memory")


def _head_boxes(group: GroupPlan, start: float) -> list[list[tuple[float, float]]]:
    stop = start + group.tokens
    return [_box(start, stop, *share.q_heads) for share in group.ranks]


def _token_boxes(group: GroupPlan, start: float) -> list[list[tuple[float, float]]]:
    edges = start + np.concatenate([[0], np.cumsum([share.tokens for share in group.ranks])])
    return [_box(a, b, 0, 1) for a, b in pairwise(edges)]


def _box(left: float, right: float, bottom: float, top: float) -> list[tuple[float, float]]:
    return [(left, bottom), (right, bottom), (right, top), (left, top)]


def _colours(plan: Plan) -> dict[str | None, str]:
    models = dict.fromkeys(share.gpu for share in plan.shares)
    return {gpu: f"C{index % 10}" for index, gpu in enumerate(models)}


def _fill(axes: Axes, bottom: Floats, top: Floats, colour: Any, label: str) -> None:
    """Fill one bar a rank as a single shape, which keeps pages of many ranks small."""
    axes.stairs(top, _edges(len(top)), baseline=bottom, fill=True, color=colour, label=label)


def _edges(world_size: int) -> Floats:
    edges: Floats = np.linspace(-0.5, world_size - 0.5, world_size + 1)
    return edges


def _figure(height: float, height_ratios: Sequence[float] = (1,)) -> tuple[Figure, list[Axes]]:
    """Return a figure of one or more plots below each other; a single one is by rank."""
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    FigureCanvasSVG(figure)
    rows = figure.subplots(
        len(height_ratios), 1, sharex=True, squeeze=False, height_ratios=height_ratios
    )
    if len(height_ratios) == 1:
        rows[0, 0].set_xlabel("rank")
        rows[0, 0].margins(x=0)
    return figure, list(rows[:, 0])


def _svg(figure: Figure, name: str) -> str:
    """Return the figure for a page; `name` keeps the ids of a page's figures apart."""
    text = io.StringIO()
    with rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    element = re.sub(r"^.*?(?=<svg)", "", text.getvalue(), flags=re.DOTALL)
    return re.sub(r'( id="|href="#|url\(#)', rf"\1{name}-", element)
