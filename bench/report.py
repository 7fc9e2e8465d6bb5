"""Write docs/benchmarks.md from the measurements in bench/results: every row, losses included.

Of each case on each card the newest run counts. A ratio compares implementations of one run on one
card only: ours against the fastest peer, above 1 where ours is faster.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
OURS = "hexiseq"
PORTABLE = "hexiseq-portable"
"""Ours too: the kernels for all cards where the Hopper kernels are the default."""
PEERS = {
    PORTABLE: "ours, portable kernels",
    "fa4": "FlashAttention-4",
    "cudnn": "cuDNN SDPA",
    "fa2": "FlashAttention-2 (PyTorch)",
    "flex": "FlexAttention",
    "torch": "PyTorch",
    "copy": "device copy",
}
Line = dict[str, Any]

HEAD = """\
# Benchmarks

Made by `python bench/report.py` from `bench/results/*.jsonl`; `make bench` on a GPU adds to them.
Medians of CUDA events. FLOPs are counted as 4 H D pairs forward and 2.5 times that backward,
whatever a kernel really computes. The ratio is ours to the fastest peer of the same run. What each
suite runs stands in the module docstrings of `bench/`.
"""


def read(folder: Path) -> list[Line]:
    """Return all kernel measurements, oldest first."""
    lines = []
    for path in sorted(folder.glob("*.jsonl")):
        lines += [json.loads(text) for text in path.read_text().splitlines()]
    return [line for line in lines if "impl" in line]


def newest(lines: Iterable[Line]) -> dict[tuple[str, ...], dict[str, Line]]:
    """Return, for each suite, card, case and direction, the newest run's lines by impl."""
    runs: dict[tuple[str, ...], dict[str, dict[str, Line]]] = defaultdict(dict)
    for line in lines:
        key = tuple(line[name] for name in ("suite", "card", "case", "direction"))
        by_run = runs[key]
        by_run.setdefault(line["run"], {})[line["impl"]] = line
    return {key: list(by_run.values())[-1] for key, by_run in runs.items()}


def page(lines: Iterable[Line]) -> str:
    """Return the page: a table for each suite and card."""
    tables: dict[tuple[str, str], dict[tuple[str, ...], dict[str, Line]]] = defaultdict(dict)
    for (suite, card, *case), impls in newest(lines).items():
        tables[suite, card][tuple(case)] = impls
    return HEAD + "".join(_table(*key, rows) for key, rows in sorted(tables.items()))


def _table(suite: str, card: str, rows: dict[tuple[str, ...], dict[str, Line]]) -> str:
    used = {impl for impls in rows.values() for impl in impls}
    peers = [impl for impl in PEERS if impl in used]
    peers += sorted(used - {OURS, *PEERS})
    first = next(iter(next(iter(rows.values())).values()))
    unit = "TFLOP/s" if "tflops" in first else "GB/s"
    versions = f"torch {first['torch']}, triton {first['triton']}"
    names = [PEERS.get(impl, impl) for impl in peers]
    columns = ["case", "direction", f"ours, {unit}", *names, "ratio"]
    text = [f"\n## {suite} on {card}\n\n{versions}\n", _row(columns), _row(["---"] * len(columns))]
    for (case, direction), impls in rows.items():
        speeds = {
            impl: float(line.get("tflops", line.get("gbs", 0))) for impl, line in impls.items()
        }
        best = max(
            (speed for impl, speed in speeds.items() if impl not in (OURS, PORTABLE)),
            default=0.0,
        )
        ratio = f"{speeds[OURS] / best:.2f}" if best and OURS in speeds else ""
        shown = [f"{speeds[impl]:.0f}" if impl in speeds else "" for impl in (OURS, *peers)]
        text.append(_row([case, direction, *shown, ratio]))
    return "\n".join(text) + "\n"


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page(read(RESULTS)), encoding="utf-8")
