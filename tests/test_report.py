"""The benchmark page shows the newest run of each case, and is the one in docs/."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


def load_report() -> Any:
    if str(ROOT / "bench") not in sys.path:  # where report.py finds its parts
        sys.path.append(str(ROOT / "bench"))
    spec = importlib.util.spec_from_file_location("report", ROOT / "bench" / "report.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def line(run: str, impl: str, tflops: float) -> dict[str, Any]:
    fixed = {"suite": "forward", "card": "H", "case": "c", "direction": "forward"}
    return fixed | {"run": run, "impl": impl, "tflops": tflops, "torch": "2", "triton": "3"}


def test_the_ratio_is_to_the_fastest_peer_of_the_newest_run() -> None:
    report = load_report()
    lines = [line("a", "hexiseq", 1), line("a", "fa2", 9)]
    lines += [line("b", "hexiseq", 300), line("b", "fa2", 200), line("b", "cudnn", 400)]
    rows = [row for row in report.page(lines).splitlines() if row.startswith("| c ")]
    assert rows == ["| c | forward | 300 | 400 | 200 | 0.75 |"]


def test_a_run_of_one_implementation_does_not_replace_a_comparison() -> None:
    report = load_report()
    lines = [line("a", "hexiseq", 300), line("a", "fa2", 200), line("b", "hexiseq", 400)]
    assert "| c | forward | 300 | 200 | 1.50 |" in report.page(lines)
    assert "| c | forward | 400 |  |" in report.page(lines[2:])


def test_pairs_stand_last_with_their_intervals() -> None:
    report = load_report()
    pair = {"suite": "paired", "card": "H", "triton": "3", "case": "c", "direction": "forward"}
    pair |= {"peer": "fa4"}
    numbers = {"tflops": 510.2, "peer_tflops": 500.0, "ratio": 1.02, "low": 1.012, "high": 1.0281}
    older = numbers | {"ratio": 0.5}
    page = report.page([pair | older, line("a", "hexiseq", 1), pair | numbers])
    assert page.endswith("| c | 510 | FlashAttention-4 | 500 | 1.020 | 1.012 to 1.028 |\n")
    assert "0.500" not in page


def test_mixed_ranks_are_held_against_the_best_even_layout_and_the_bound() -> None:
    report = load_report()
    shared = {"suite": "mixed", "card": "2x H", "case": "c", "run": "a", "torch": "2"}
    shared |= {"emulated": ["", "emulated: 44 of 132 SMs"]}
    found = [
        shared | {"impl": "hexiseq", "median_ms": 100.0},
        shared | {"impl": "even", "median_ms": 160.0, "layout": "even, ulysses"},
        shared | {"impl": "bound", "median_ms": 90.0},
    ]
    row = "| c | 100.0 | 160.0 (ulysses) | 1.60x faster | 90.0 | 90.0% |"
    assert row in report.page([line("a", "hexiseq", 1), *found])
    without = report.page([line("a", "hexiseq", 1), *found[::2]])
    assert "| c | 100.0 |  |  | 90.0 | 90.0% |" in without


def test_the_interval_is_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    paired = importlib.import_module("paired")
    ours = [1.0, 1.1, 0.9, 1.3, 1.0]  # a card that slows down and recovers, for both
    assert paired.interval(ours, [1.2 * x for x in ours]) == pytest.approx((1.2, 1.2, 1.2))
    _, low, high = paired.interval(ours, ours[::-1])
    assert low < 1 < high


def test_the_page_in_docs_is_current() -> None:
    report = load_report()
    assert report.PAGE.read_text() == report.page(report.read(report.RESULTS))
