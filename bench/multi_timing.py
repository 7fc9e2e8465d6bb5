"""Time calls that all ranks make together, and append each measurement to bench/results.

A sample is a few calls in a row between two CUDA events, after a barrier; its time is that of the
slowest rank. Samples of one call in a row would time the host's way to the first launch.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta

import measure
import torch
import torch.distributed as dist
import triton

from hexiseq_triton import environment

WARM_UP_CALLS = 2
SAMPLES = 7
SAMPLE_MS = 60.0
"""About how long a sample should take; at least one call."""


def start_world() -> torch.device:
    """Join torchrun's processes over NCCL and return this one's GPU."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    environment.start_world(device, timedelta(seconds=60))
    return device


def slowest_ms(call: Callable[[], object]) -> float:
    """Return the median milliseconds of `call` on the slowest rank; a collective call."""
    for _ in range(WARM_UP_CALLS):
        once = _sample(call, 1)
    in_a_row = max(1, min(10, int(SAMPLE_MS / once)))
    return statistics.median(_sample(call, in_a_row) for _ in range(SAMPLES))


def _sample(call: Callable[[], object], in_a_row: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    start.record()
    for _ in range(in_a_row):
        call()
    stop.record()
    stop.synchronize()
    slowest = torch.tensor(start.elapsed_time(stop) / in_a_row, device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


class Results:
    """The measurements of one run; what it already holds is not measured again.

    Args:
        run: names the run. Calls of one run on one card may be compared.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._path = measure.RESULTS / "multi.jsonl"
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        found = [line for line in map(json.loads, lines) if line["run"] == run]
        self._done = {(line["case"], line["impl"], line["direction"]) for line in found}

    def has(self, case: str, impl: str, direction: str) -> bool:
        """Return whether this was measured before the run was cut off."""
        return (case, impl, direction) in self._done

    def add(
        self, case: str, impl: str, direction: str, ms: float, rates: Mapping[str, float]
    ) -> None:
        """Append a measurement; rank 0 writes."""
        if dist.get_rank():
            return
        line = {
            "suite": "multi",
            "case": case,
            "impl": impl,
            "direction": direction,
            "card": f"{dist.get_world_size()}x {torch.cuda.get_device_name()}",
            "torch": torch.__version__,
            "triton": triton.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "commit": measure.commit(),
            "date": datetime.now(UTC).date().isoformat(),
            "run": self._run,
            "median_ms": round(ms, 4),
            **{name: round(rate, 1) for name, rate in rates.items()},
        }
        measure.RESULTS.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as lines:
            lines.write(json.dumps(line) + "\n")
        print(f"{case:44} {impl:24} {direction:18} {ms:9.3f} ms {dict(rates)}", flush=True)
