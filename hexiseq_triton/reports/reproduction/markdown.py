"""Tables and figures in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from hexiseq_triton.planner.reproduction.rows import Row

TOKENS_PER_K = 1024


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]


def cell_name(row: Row) -> str:
    """Return where a row is: experiment, model and length."""
    return f"{row.experiment}, {row.model}, {length(row.seq_len)}"


def length(seq_len: int) -> str:
    return f"{seq_len // TOKENS_PER_K}K"


def ratio(value: float | None) -> str:
    """Return a ratio at two decimals."""
    return _shown(value, ".2f")


def figure(value: float | None) -> str:
    """Return a figure of the paper as it was given."""
    return _shown(value, "g")


def percent(share: float | None) -> str:
    return _shown(share, ".0%")


def rate(tokens_per_s: float | None) -> str:
    return _shown(tokens_per_s, ",.0f")


def seconds(value: float | None) -> str:
    return _shown(value, ".3g")


def more(times: float | None) -> str:
    """Return how much longer something takes."""
    return _shown(None if times is None else times - 1, "+.0%")


def _shown(value: float | None, form: str) -> str:
    """Return a number in a format; a dash where there is none."""
    return "-" if value is None else format(value, form)
