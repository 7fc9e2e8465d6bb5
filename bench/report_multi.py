"""The multi-GPU sections of docs/benchmarks.md, from bench/results/multi.jsonl and rings.jsonl.

Of each suite and card the newest run of a table counts, whole: all its rows come from one run on
one host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

SUITES = ("multi", "rings")
NAMES = {
    "hexiseq-heads": "**ours, one group** (peer memory)",
    "hexiseq-heads-nccl": "ours, one group (NCCL)",
    "hexiseq-ring": "**ours, groups of one** (peer memory)",
    "hexiseq-ring-nccl": "ours, groups of one (NCCL)",
    "hexiseq-ring-spread": "ours, groups of one, keys of all groups at any time",
    "hexiseq-hybrid": "ours, groups of two (peer memory)",
    "hexiseq-hybrid-nccl": "ours, groups of two (NCCL)",
    "hexiseq-uneven": "ours, groups of 3 and 1, uneven tokens and heads",
    "ulysses-fa4": "Ulysses + FlashAttention-4",
    "ulysses-cudnn": "Ulysses + cuDNN",
    "ring-fa4": "ring-flash-attention zigzag + FlashAttention-4",
    "ring-fa2": "ring-flash-attention zigzag + FlashAttention-2",
    "torch-cp-cudnn": "PyTorch context_parallel + cuDNN (a KV head for each query head)",
}
MOVES = {
    "bare": "all_to_all_single of the same bytes, nothing laid out",
    "permuted": "copy, all_to_all_single, copy for each tensor",
    "hexiseq": "**ours, peer memory**",
    "hexiseq-nccl": "ours, NCCL",
}
Line = dict[str, Any]


def section(lines: Iterable[Line]) -> str:
    """Return the tables of all suites and cards; "" without measurements."""
    by_card: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        if line["suite"] in SUITES:
            by_card.setdefault((line["suite"], line["card"]), []).append(line)
    return "".join(_of_card(*key, found) for key, found in sorted(by_card.items()))


def _of_card(suite: str, card: str, lines: Sequence[Line]) -> str:
    text = f"\n## {suite} on {card}\n"
    for unit, table in (("tflops", _attention), ("gbs", _moves)):
        found = [line for line in lines if unit in line]
        if found:
            newest = [line for line in found if line["run"] == found[-1]["run"]]
            text += table(newest)
    return text


def _versions(line: Line) -> str:
    return f"torch {line['torch']}, triton {line['triton']}, NCCL {line['nccl']}; run {line['run']}"


def _attention(lines: Sequence[Line]) -> str:
    alone = {line["case"]: line["tflops"] for line in lines if line["impl"] == "alone"}
    rates = {(line["case"], line["impl"]): line["tflops"] for line in lines}
    cases = list(dict.fromkeys(case for case, impl in rates if impl != "alone"))
    rows = [["", *cases]]
    for impl, name in NAMES.items():
        found = [rates.get((case, impl)) for case in cases]
        if any(found):
            rows.append([name, *("" if rate is None else f"{rate:.0f}" for rate in found)])
    if not cases:
        return ""
    head = (
        "\nForward and backward, TFLOP/s of the busiest GPU. One GPU alone, without communication, "
        "on a rank's own shape: "
    )
    shapes = ", ".join(f"{rate:.0f} on {case}" for case, rate in alone.items())
    return f"{head}{shapes} ({_versions(lines[0])}).\n\n{_table(rows)}"


def _moves(lines: Sequence[Line]) -> str:
    times = {line["impl"]: (line["median_ms"], line["gbs"]) for line in lines}
    if "bare" not in times:
        return ""
    rows = [["", "ms", "GB/s that leave a GPU", "time to bare"]]
    for impl, name in MOVES.items():
        if impl in times:
            ms, rate = times[impl]
            rows.append([name, f"{ms:.3f}", f"{rate:.0f}", f"{ms / times['bare'][0]:.2f}"])
    head = f"\nThe head all-to-all alone, q, k, v in and o out, {lines[0]['case']}"
    return f"{head} ({_versions(lines[0])}):\n\n{_table(rows)}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"
