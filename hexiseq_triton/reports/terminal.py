"""Where tables are printed: as wide as the terminal, and never so narrow that a number is cut."""

from __future__ import annotations

import sys
from io import TextIOWrapper

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

FILE_WIDTH = 120
"""Columns of what goes to a file or another program."""
_UNBOUNDED = 10_000
"""Columns in which every table fits; for measuring what it needs."""


def replace_unencodable() -> None:
    """Let stdout print "?" for what its encoding lacks, where that would be an error."""
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def terminal(file_width: int = FILE_WIDTH) -> Console:
    """Return a console of the terminal's width, or of `file_width` where there is none.

    It prints text as it is: a name from a file may have brackets, or a word between colons.
    """
    width = None if sys.stdout.isatty() else file_width
    return Console(width=width, markup=False, emoji=False)


def print_line(line: str, console: Console) -> None:
    """Print text as it is, whatever console it is; the terminal may wrap it."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def print_table(table: Table, console: Console) -> None:
    """Print a table whose numbers stay whole.

    Where the console is too narrow, lines break between words, then in headers; if that is not
    enough, rows are longer than its lines. Rich alone would end cells in an ellipsis.
    """
    width = console.width
    needs = _needs(table, console)
    if needs.minimum > width:
        for column in table.columns:
            column.header = str(column.header).replace(" ", "\n")
        needs = _needs(table, console)
    if needs.maximum > width:
        table.width = max(width, needs.minimum)
    console.width = _UNBOUNDED  # rich cuts off what is beyond it
    try:
        console.print(table)
    finally:
        console.width = width


def _needs(table: Table, console: Console) -> Measurement:
    """Return the least and most columns a table takes; no column may break a word, or a number."""
    for column in table.columns:
        column.no_wrap = column.no_wrap or column.justify == "right"
        column.overflow = "fold"
        cells = [str(cell) for cell in (column.header, *column.cells)]
        parts = [cell.splitlines() if column.no_wrap else cell.split() for cell in cells]
        column.min_width = max((cell_len(part) for each in parts for part in each), default=0)
    return Measurement.get(console, console.options.update(width=_UNBOUNDED), table)
