"""Fast and slow ranks in docs/benchmarks.md: speed, prediction and memory, from `bench/results`.

Of each card the newest run of a suite counts; of memory, which ends in a rank's death, each plan's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

Line = dict[str, Any]


def sections(lines: Iterable[Line]) -> str:
    """Return the tables of all cards; "" without measurements."""
    lines = list(lines)
    text = ""
    for suite, table in SUITES.items():
        by_card: dict[str, list[Line]] = {}
        for line in lines:
            if line["suite"] == suite:
                by_card.setdefault(line["card"], []).append(line)
        for card, found in sorted(by_card.items()):
            run = [line for line in found if line["run"] == found[-1]["run"]]
            if suite == "memory":
                run = list({(line["case"], line["impl"]): line for line in found}.values())
            text += f"\n## {suite} on {card}\n\ntorch {run[0]['torch']}; run {run[0]['run']}. "
            text += table(run)
    return text


def _mixed(lines: Sequence[Line]) -> str:
    """Return ours beside the best even layout and the bound, a row a case."""
    found = {(line["case"], line["impl"]): line for line in lines}
    rows = [["", "ours, ms", "best even, ms", "ours is", "bound, ms", "share of the bound"]]
    for case in dict.fromkeys(case for case, _ in found):
        if (case, "hexiseq") not in found:
            continue
        ours, bound = (found[case, impl]["median_ms"] for impl in ("hexiseq", "bound"))
        best, times = "", ""
        if even := found.get((case, "even")):
            best = f"{even['median_ms']:.1f} ({even['layout'].removeprefix('even, ')})"
            times = f"{even['median_ms'] / ours:.2f}x faster"
        rows.append([case, f"{ours:.1f}", best, times, f"{bound:.1f}", f"{bound / ours:.1%}"])
    emulated = ", ".join(label or "whole" for label in lines[0]["emulated"])
    return (
        f"Ranks: {emulated}. One layer, forward and backward (`bench/mixed_speed.py`); the bound "
        f"is what the GPUs would do together if nothing were lost.\n\n{_table(rows)}"
    )


def _prediction(lines: Sequence[Line]) -> str:
    """Return measured and predicted times, fastest first within each number of tokens."""
    rows = [["plan", "measured, ms", "predicted, ms", "error"]]
    for line in sorted(lines, key=lambda line: (_tokens(line), line["median_ms"])):
        measured, predicted = line["median_ms"], line["predicted_ms"]
        rows.append([line["case"], f"{measured:.1f}", f"{predicted:.1f}", f"{line['error']:+.1%}"])
    return (
        "The same layer under plans, beside what the cost model says of them by the profile of the "
        f'same GPUs; "six" were chosen before anything was measured.\n\n{_table(rows)}'
    )


def _tokens(line: Line) -> int:
    return int(line["case"].split()[0].rpartition("t")[2])


def _margin(lines: Sequence[Line]) -> str:
    """Return what leaving multiprocessors to transfers does."""
    rows = [["plan", "", "ms"]]
    rows += [[line["case"], line["impl"], f"{line['median_ms']:.1f}"] for line in lines]
    return f"Multiprocessors of whole GPUs that attention leaves free.\n\n{_table(rows)}"


def _memory(lines: Sequence[Line]) -> str:
    """Return what became of each plan, and peaks beside the memory model's."""
    names = ("peak_gb", "outside_gb", "predicted_gb")
    rows = [["plan", "outcome", "peak of each rank, GB", "outside the allocator", "predicted"]]
    for line in lines:
        peaks = (", ".join(map(str, line.get(name, ["-"]))) for name in names)
        name = {"hexiseq": "**the planner's**", "even": "even Ulysses"}[line["impl"]]
        rows.append([name, line["outcome"], *peaks])
    return (
        f"{lines[0]['case']} (`bench/memory_caps.py`). Peaks are of the whole GPU; the caps are on "
        f"PyTorch's allocator, which contexts, NCCL and shared buffers pass by.\n\n{_table(rows)}"
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


SUITES: dict[str, Callable[[Sequence[Line]], str]] = {
    "mixed": _mixed,
    "prediction": _prediction,
    "margin": _margin,
    "memory": _memory,
}
