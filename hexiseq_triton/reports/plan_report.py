"""A plan as one HTML page that needs nothing else: figures, tables and plots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from rich.table import Table

from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.plans import Plan
from hexiseq_triton.planner.terms import Terms
from hexiseq_triton.reports.plan_plots import holdings_svg, memory_svg, seconds_svg
from hexiseq_triton.reports.plan_tables import (
    assumed_lines,
    baseline_table,
    plan_table,
    summary_lines,
)
from hexiseq_triton.wording import counted

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem }
th, td { padding: 0.2rem 0.8rem 0.2rem 0; text-align: left; border-bottom: 1px solid #ddd }
td.right, th.right { text-align: right; font-variant-numeric: tabular-nums }
svg { max-width: 100%; height: auto }
"""


def write_report(path: str | Path, plan: Plan, cluster: Cluster, terms: Terms) -> None:
    """Write the page.

    Args:
        path: the file.
        plan: the plan.
        cluster: what it was made for; its GPUs' figures are listed with their origins.
        terms: seconds in one step by part and rank (`terms_of`).
    """
    sections = [
        ("", _paragraphs([*summary_lines(plan), *assumed_lines(cluster)])),
        ("Who holds what", holdings_svg(plan) + html_table(plan_table(plan))),
        ("Seconds of each rank in one step", seconds_svg(plan, _stacked(terms))),
        ("Memory of each rank at its peak", memory_svg(plan)),
        ("Compared with", html_table(baseline_table(plan)) if plan.baselines else ""),
        ("What the figures rest on", html_table(_figures(cluster))),
    ]
    body = "\n".join(
        (f"<h2>{escape(title)}</h2>\n" if title else "") + content
        for title, content in sections
        if content
    )
    title = escape(f"Plan for {counted(plan.world_size, 'GPU')}: {plan.strategy}")
    Path(path).write_text(
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f"<style>{STYLE}</style>\n<h1>{title}</h1>\n{body}\n</html>\n",
        encoding="utf-8",
    )


def _stacked(terms: Terms) -> Terms:
    """Return the terms with both directions together, and all that is waited for."""
    together: Terms = {}
    for name, seconds in terms.items():
        part = name.removeprefix("forward ").removeprefix("backward ")
        part = "waiting" if part.startswith("wait") else part
        part = "FSDP" if part.startswith("FSDP") else part
        together[part] = together.get(part, 0.0) + seconds
    waiting = together.pop("waiting")
    return together | {"waiting": waiting}


def _figures(cluster: Cluster) -> Table:
    """Return one row a figure of each GPU model."""
    table = Table()
    for name in ("GPU", "figure"):
        table.add_column(name)
    table.add_column("value", justify="right")
    for name in ("origin", "source"):
        table.add_column(name)
    for name, gpu in cluster.gpus.items():
        for field, figure in gpu.figures():
            table.add_row(name, field, f"{figure.value:g}", figure.origin, figure.source)
    return table


def html_table(table: Table) -> str:
    """Return a rich table of plain text as HTML."""
    columns = table.columns
    classes = [' class="right"' if column.justify == "right" else "" for column in columns]
    head = _row("th", (str(column.header) for column in columns), classes)
    cells = [[str(cell) for cell in column.cells] for column in columns]
    rows = [_row("td", row, classes) for row in zip(*cells, strict=True)]
    caption = f"<caption>{escape(str(table.caption))}</caption>" if table.caption else ""
    return "\n".join(["<table>", caption, head, *rows, "</table>"])


def _row(tag: str, cells: Iterable[str], classes: Sequence[str]) -> str:
    filled = "".join(
        f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in zip(cells, classes, strict=True)
    )
    return f"<tr>{filled}</tr>"


def _paragraphs(lines: Iterable[str]) -> str:
    return "\n".join(f"<p>{escape(line)}</p>" for line in lines)
