"""What the demo shows: the plan, the losses side by side, a plot, and whether it all held."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from hexiseq_triton.planner import Plan
from hexiseq_triton.reports.plan_tables import print_plan
from hexiseq_triton.reports.terminal import print_line, print_table, terminal
from hexiseq_triton.wording import counted

if TYPE_CHECKING:
    from hexiseq_triton.demo import Summary


def print_plan_chosen(chosen: Plan) -> None:
    """Print the plan's tables, and what it has over the best baseline."""
    console = terminal()
    print_plan(chosen, console)
    priced = {
        name: baseline.step_seconds
        for name, baseline in chosen.baselines.items()
        if baseline.step_seconds is not None
    }
    if chosen.predicted and priced:
        best = min(priced, key=lambda name: priced[name])
        ratio = priced[best] / chosen.predicted.step_seconds
        print_line(f"predicted {ratio:.2f}x as fast as the best baseline, {best}", console)


def print_losses(distributed: Sequence[float], single: Sequence[float]) -> None:
    """Print the losses of both runs side by side."""
    table = Table(title="loss, nats a token")
    for name in ("step", "under the plan", "one process", "relative difference"):
        table.add_column(name, justify="right")
    for step, (a, b) in enumerate(zip(distributed, single, strict=True), 1):
        table.add_row(str(step), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b) / b:.1e}")
    print_table(table, terminal())


def print_verdict(summary: Summary, failures: Sequence[str], out: Path) -> None:
    """Print the figures that decide, and what failed."""
    console = terminal()
    print_line(
        f"largest relative difference: loss {summary.max_relative_loss_difference:.2g}, "
        f"gradient of step 1 {summary.max_relative_gradient_difference:.2g}\n"
        f"the loss fell by {summary.loss_drop:.2f} nats; cuts run through "
        f"{counted(summary.documents_cut, 'document')} of step 1\n"
        f"{summary.seconds:.0f} s on {summary.device}; open {out / 'loss.png'}, and "
        f"{out / 'trace.json'} in https://ui.perfetto.dev",
        console,
    )
    for failure in failures:
        console.print("failed:", style="red", end=" ")
        print_line(failure, console)


def draw_losses(distributed: Sequence[float], single: Sequence[float], path: Path) -> None:
    """Draw both loss curves, and their relative difference below."""
    figure = Figure(figsize=(7, 6), layout="constrained")
    FigureCanvasAgg(figure)
    losses, differences = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps = range(1, len(single) + 1)
    losses.plot(steps, single, linewidth=5, alpha=0.35, label="one process, dense attention")
    losses.plot(steps, distributed, linewidth=1.5, label="four uneven ranks under the plan")
    losses.set_ylabel("loss, nats a token")
    losses.legend()
    pairs = zip(distributed, single, strict=True)
    differences.semilogy(steps, [max(abs(a - b) / b, 1e-9) for a, b in pairs], "o-", markersize=3)
    differences.axhline(1e-5, color="grey", linestyle=":")
    differences.set_ylabel("relative difference")
    differences.set_xlabel("step")
    differences.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=150)
