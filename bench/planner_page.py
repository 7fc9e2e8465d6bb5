"""Keep the rows of the planner's experiments, and write docs/planner-results.md from them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from inspect import cleandoc
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "planner.jsonl"
PAGE = ROOT / "docs" / "planner-results.md"
Row = dict[str, Any]

HEAD = """\
# What the planner was measured to do

Made by `python bench/planner_experiments.py` from `bench/results/planner.jsonl`. Times of steps are
the cost model's; no hardware was used. `seconds` of planning are medians by the clock, and
`cpu_seconds` leave out what other programs of the machine took. What the gap's parts mean stands in
[planner.md](planner.md).
"""


def keep(experiment: str, rows: Sequence[Row]) -> None:
    """Replace an experiment's rows in the results."""
    lines = [line for line in _lines() if line["experiment"] != experiment]
    lines += [{"experiment": experiment, "row": row} for row in rows]
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def page(experiments: Mapping[str, str]) -> str:
    """Return a section for each experiment: what it is, and its rows, those alike in one table."""
    text = [HEAD]
    for name, explained in experiments.items():
        text += [f"\n## {name.replace('_', ' ')}\n", f"{cleandoc(explained)}\n"]
        tables: dict[tuple[str, ...], list[Row]] = {}
        for line in _lines():
            if line["experiment"] == name:
                tables.setdefault(tuple(line["row"]), []).append(line["row"])
        for columns, rows in tables.items():
            text += [_line(columns), _line(["---"] * len(columns))]
            text += [_line(_cell(row[column]) for column in columns) for row in rows]
            text.append("")
    return "\n".join(text).rstrip() + "\n"


def _lines() -> list[dict[str, Any]]:
    if not RESULTS.exists():
        return []
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")
