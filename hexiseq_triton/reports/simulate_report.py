"""A simulated step as tables, and as one HTML page that needs nothing else."""

from __future__ import annotations

from base64 import b64encode
from html import escape
from pathlib import Path

from matplotlib.figure import Figure
from rich.table import Table

from hexiseq_triton.planner.simulator import Simulation
from hexiseq_triton.reports.plan_report import STYLE, html_table
from hexiseq_triton.reports.simulate_plots import png
from hexiseq_triton.reports.simulate_tables import rank_table, section_table, summary_lines
from hexiseq_triton.wording import counted


def write_report(path: str | Path, simulation: Simulation, figures: dict[str, Figure]) -> None:
    """Write the page.

    Args:
        path: the file.
        simulation: what it is about.
        figures: plots by title.
    """
    title = f"Simulated step on {counted(simulation.cost.problem.cluster.world_size, 'GPU')}"
    parts = ["".join(f"<p>{escape(line)}</p>\n" for line in summary_lines(simulation))]
    parts += [f"<h2>{escape(name)}</h2>\n{_image(name, each)}" for name, each in figures.items()]
    for name, table in _tables(simulation).items():
        parts.append(f"<h2>{escape(name)}</h2>\n{html_table(table)}")
    Path(path).write_text(
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f"<style>{STYLE}img {{ max-width: 100% }}</style>\n<h1>{title}</h1>\n"
        + "\n".join(parts)
        + "\n</html>\n",
        encoding="utf-8",
    )


def _tables(simulation: Simulation) -> dict[str, Table]:
    return {"Sections of the step": section_table(simulation), "Ranks": rank_table(simulation)}


def _image(name: str, figure: Figure) -> str:
    content = b64encode(png(figure)).decode()
    return f'<img alt="{escape(name)}" src="data:image/png;base64,{content}">'
