"""Write docs/benchmarks.md from the measurements in bench/results: every row, losses included.

Of each case on each card the newest run counts: a row shows one run on one card. The ratio is ours
to the fastest peer, above 1 where ours is faster; the peer of launches that carry state is one
launch.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import report_mixed
import report_multi

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
OURS = "hexiseq"
PORTABLE = "hexiseq-portable"
"""Ours too: the kernels for all cards where the Hopper kernels are the default."""
PEERS = {
    PORTABLE: "ours, portable kernels",
    "hexiseq-one-launch": "ours, one launch",
    "hexiseq-portable-one-launch": "portable, one launch",
    "fa4": "FlashAttention-4",
    "cudnn": "cuDNN SDPA",
    "fa2": "FlashAttention-2 (PyTorch)",
    "flex": "FlexAttention",
    "torch": "PyTorch",
    "copy": "device copy",
}
PAIRED = "paired"
"""The suite whose lines compare two implementations."""
Line = dict[str, Any]

HEAD = """\
# Benchmarks

Made by `python bench/report.py` from `bench/results/*.jsonl`; `make bench` on a GPU adds to them.
Medians of CUDA events. FLOPs are counted as 4 H D pairs forward and 2.5 times that backward,
whatever a kernel really computes. A row comes from one run on one card; the ratio is ours to its
fastest peer. What each suite runs stands in the module docstrings of `bench/`.
"""


PAIRED_HEAD = """\
`bench/paired.py`: ours and the peer in turn, 15 rounds or more. The ratio is the peer's median time
to ours, with its 95% interval. The peer of chunks of keys is one launch that sees all of them.
"""


def read(folder: Path) -> list[Line]:
    """Return all kernel measurements, oldest first."""
    lines = []
    for path in sorted(folder.glob("*.jsonl")):
        lines += [json.loads(text) for text in path.read_text().splitlines()]
    return [line for line in lines if "impl" in line or line.get("suite") == PAIRED]


def newest(lines: Iterable[Line]) -> dict[tuple[str, ...], dict[str, Line]]:
    """Return, for each suite, card, case and direction, the newest run's lines by impl.

    A run of one implementation compares nothing: it counts where there is no other.
    """
    runs: dict[tuple[str, ...], dict[str, dict[str, Line]]] = defaultdict(dict)
    for line in lines:
        key = tuple(line[name] for name in ("suite", "card", "case", "direction"))
        by_run = runs[key]
        by_run.setdefault(line["run"], {})[line["impl"]] = line
    return {
        key: max(enumerate(by_run.values()), key=lambda run: (len(run[1]) > 1, run[0]))[1]
        for key, by_run in runs.items()
    }


def page(lines: Iterable[Line]) -> str:
    """Return the page: a table for each suite and card, comparisons in pairs last."""
    lines = list(lines)
    pairs = [line for line in lines if line["suite"] == PAIRED]
    apart = {PAIRED, *report_multi.SUITES, *report_mixed.SUITES}
    several = [line for line in lines if line["suite"] in apart]
    lines = [line for line in lines if line["suite"] not in apart]
    tables: dict[tuple[str, str], dict[tuple[str, ...], dict[str, Line]]] = defaultdict(dict)
    for (suite, card, *case), impls in newest(lines).items():
        tables[suite, card][tuple(case)] = impls
    return (
        HEAD
        + "".join(_table(*key, rows) for key, rows in sorted(tables.items()))
        + _pairs(pairs)
        + report_multi.section(several)
        + report_mixed.sections(several)
    )


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


def _pairs(lines: Iterable[Line]) -> str:
    """Return a table for each card and Triton, with the newest line of each case and peer."""
    tables: dict[tuple[str, str], dict[tuple[str, str], Line]] = defaultdict(dict)
    for line in lines:
        tables[line["card"], line["triton"]][line["case"], line["peer"]] = line
    columns = ["case", "ours, TFLOP/s", "peer", "peer, TFLOP/s", "ratio", "95% interval"]
    text = ""
    for (card, triton), newest_lines in sorted(tables.items()):
        rows = [
            _row(
                [
                    case, f"{line['tflops']:.0f}", PEERS.get(peer, peer),
                    f"{line['peer_tflops']:.0f}", f"{line['ratio']:.3f}",
                    f"{line['low']:.3f} to {line['high']:.3f}",
                ]
            )
            for (case, peer), line in newest_lines.items()
        ]  # fmt: skip
        table = "\n".join([_row(columns), _row(["---"] * len(columns)), *rows])
        text += f"\n## In pairs on {card}, Triton {triton}\n\n{PAIRED_HEAD}\n{table}\n"
    return text


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page(read(RESULTS)), encoding="utf-8")
