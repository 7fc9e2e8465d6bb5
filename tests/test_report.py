"""The benchmark page shows the newest run of each case, and is the one in docs/."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def load_report() -> Any:
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


def test_the_page_in_docs_is_current() -> None:
    report = load_report()
    assert report.PAGE.read_text() == report.page(report.read(report.RESULTS))
