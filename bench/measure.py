"""Time with CUDA events, and keep every measurement as one line of bench/results/*.jsonl."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton

RESULTS = Path(os.environ.get("HEXISEQ_BENCH_RESULTS", Path(__file__).parent / "results"))
RUN = uuid.uuid4().hex[:8]
"""Names what ran side by side: one process, one card."""


def timed(benchmark: Any, function: Callable[[], object], seconds: float = 0.6) -> float:
    """Return the median milliseconds of `function` on the device, after a warm-up."""
    for _ in range(3):
        once = event_ms(function)
    rounds = max(5, min(200, int(seconds * 1000 / once)))
    times: list[float] = []
    benchmark.pedantic(lambda: times.append(event_ms(function)), rounds=rounds, iterations=1)
    return statistics.median(times)


def event_ms(function: Callable[[], object], ahead_ms: float = 1.0) -> float:
    """Return the milliseconds of one call on the device, after about `ahead_ms` of waiting there,
    in which the host gets ahead."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(ahead_ms * 2e6))
    start.record()
    function()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def outside_allocator(device: torch.device) -> int:
    """Return the bytes of a GPU in use that PyTorch's allocator does not hold: CUDA's context,
    NCCL, memory that ranks share."""
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free - torch.cuda.memory_reserved(device))


def record(
    benchmark: Any,
    suite: str,
    case: str,
    impl: str,
    direction: str,
    ms: float,
    *,
    flops: float | None = None,
    num_bytes: float | None = None,
) -> None:
    """Append one measurement to the results and show it in pytest-benchmark's table.

    Its rate is TFLOP/s where `flops` are given, GB/s where `num_bytes` are.
    """
    rate = {"median_ms": round(ms, 4)}
    if flops is not None:
        rate["tflops"] = round(flops / ms / 1e9, 1)
    if num_bytes is not None:
        rate["gbs"] = round(num_bytes / ms / 1e6, 1)
    benchmark.extra_info.update(rate)
    keep(suite, case=case, impl=impl, direction=direction, **rate)


def keep(suite: str, **fields: Any) -> None:
    """Append one line to the results of a suite, with the card and the versions."""
    line = {
        "suite": suite,
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "run": RUN,
        **fields,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    with (RESULTS / f"{suite}.jsonl").open("a") as lines:
        lines.write(json.dumps(line) + "\n")


def commit() -> str:
    """Return the commit that ran: from git, or from where the tree was copied from."""
    if "HEXISEQ_COMMIT" in os.environ:
        return os.environ["HEXISEQ_COMMIT"]
    here = Path(__file__).parent
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=here, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return found.stdout.strip() or "unknown"


def long_tail(total: int) -> tuple[int, ...]:
    """Return document lengths drawn log-normally, median 1,100 tokens, that add up to `total`."""
    draw = random.Random(0)
    lengths: list[int] = []
    while sum(lengths) < total:
        length = min(max(16, int(draw.lognormvariate(7.0, 1.3))), 32768)
        lengths.append(min(length, total - sum(lengths)))
    return tuple(lengths)
