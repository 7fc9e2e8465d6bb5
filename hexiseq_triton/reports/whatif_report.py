"""What variants of a cluster come to: a table, and the frontier of cost and throughput."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from hexiseq_triton.planner.whatif import Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FRONTIER = "*"


def outcomes_table(outcomes: Sequence[Outcome]) -> Table:
    """Return one row a variant, the cluster as it is first; costs only where any is known."""
    priced = any(each.price_per_hour is not None for each in outcomes)
    table = Table(
        caption=f"{FRONTIER} no other variant is faster and as cheap, or cheaper and as fast"
        if priced
        else None
    )
    table.add_column("variant")
    table.add_column("GPUs")
    names = ["tokens/s", "MFU", "longest"]
    if priced:
        names += ["price an hour", "per 10^6 tokens"]
    for name in names:
        table.add_column(name, justify="right")
    base = outcomes[0]
    for each in outcomes:
        cells = [
            _compared(each.tokens_per_s, base.tokens_per_s, ",.0f"),
            "-" if each.mfu is None else f"{each.mfu:.1%}",
            f"{each.longest_seq_len:,}",
        ]
        if priced:
            cost = each.cost_per_million_tokens
            cells.append("-" if each.price_per_hour is None else f"{each.price_per_hour:,.2f}")
            cells.append(_compared(cost, base.cost_per_million_tokens, ".4g"))
        mark = f" {FRONTIER}" if each.on_frontier else ""
        table.add_row(each.variant.name + mark, gpus_text(each), *cells)
    return table


def gpus_text(outcome: Outcome) -> str:
    """Return how many GPUs of each model a variant has."""
    return ", ".join(f"{count} {gpu}" for gpu, count in outcome.variant.gpus.items())


def _compared(value: float | None, base: float | None, shape: str) -> str:
    """Return a figure, and how it differs from the cluster as it is."""
    if value is None:
        return "-"
    if base is None or value == base:
        return f"{value:{shape}}"
    return f"{value:{shape}} ({value / base - 1:+.0%})"


def outcome_lines(
    outcomes: Sequence[Outcome], mode: str, missing: Sequence[str], left_out: int = 0
) -> Iterator[str]:
    """Yield what the table leaves out: who judged, what doesn't fit, what has no price.

    `left_out` combinations of changes are no variants.
    """
    yield (
        f"times are simulated (mode {mode}, engine event); longest is the longest sequence that "
        "fits at the same batch"
    )
    if left_out:
        verb = "combination is" if left_out == 1 else "combinations are"
        yield (
            f"{left_out} {verb} left out: no GPU remains, or one node only, and so no network to "
            "change"
        )
    for each in outcomes:
        if each.reason:
            yield f"{each.variant.name}: {each.reason}"
        for name, gpu in each.variant.cluster.gpus.items():
            if not gpu.runnable:
                yield f"{each.variant.name}: {name} cannot run this package's kernels: {gpu.reason}"
    if any(each.price_per_hour is not None for each in outcomes):
        yield "prices an hour are yours, and count for all GPUs as long as a step takes"
    if missing:
        yield (
            f"no price for {', '.join(missing)}: give --price {missing[0]}=... an hour, or prices "
            "in the cluster file"
        )


def outcomes_summary(outcomes: Sequence[Outcome], mode: str) -> dict[str, Any]:
    """Return what `--json` prints."""
    return {
        "mode": mode,
        "engine": "event",
        "variants": [
            {
                "name": each.variant.name,
                "gpus": each.variant.gpus,
                "tokens_per_second": each.tokens_per_s,
                "mfu": each.mfu,
                "layout": each.layout or None,
                "longest_seq_len": each.longest_seq_len,
                "price_per_hour": each.price_per_hour,
                "cost_per_million_tokens": each.cost_per_million_tokens,
                "on_frontier": each.on_frontier,
                "reason": each.reason or None,
            }
            for each in outcomes
        ],
    }


def frontier_plot(outcomes: Sequence[Outcome]) -> Figure:
    """Draw cost against throughput, a point a variant that has both; a line joins the frontier."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 5.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for each in outcomes:
        cost, rate = each.cost_per_million_tokens, each.tokens_per_s
        if cost is not None and rate is not None:
            face = "C0" if each.on_frontier else "white"
            axes.plot(cost, rate, "o", color="C0", markerfacecolor=face)
            axes.annotate(
                each.variant.name,
                (cost, rate),
                xytext=(6, 4),
                textcoords="offset points",
                fontsize="small",
            )
    best = sorted(
        (each.cost_per_million_tokens or 0.0, each.tokens_per_s or 0.0)
        for each in outcomes
        if each.on_frontier
    )
    costs, rates = [cost for cost, _ in best], [rate for _, rate in best]
    axes.plot(costs, rates, color="C0", linewidth=1, label="frontier")
    axes.margins(x=0.25)
    axes.set_ylim(bottom=0)
    axes.margins(y=0.1)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("cost of a million tokens, in the currency of your prices")
    axes.set_ylabel("tokens per second, simulated")
    axes.legend(frameon=False, loc="lower right")
    return figure
