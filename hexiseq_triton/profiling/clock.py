"""Time something on this rank's device."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

WARM_UPS = 2
FEWEST, MOST = 3, 40
"""Samples that are timed."""
SAMPLE_SECONDS = 0.03
"""How long a sample is at least: calls in a row. GPUs lower their clocks under lasting load, and
training is lasting load."""
AHEAD_SECONDS = 3e-3
"""What the GPU waits before a sample at least, so that the host gets ahead: in training it is
ahead, too. For calls in a row it waits as long as the host takes for them."""
CYCLES_PER_SECOND = 2e9


def median_seconds(
    call: Callable[[], object], device: torch.device, budget_seconds: float
) -> float:
    """Return the median seconds of `call` on the device, under load.

    On CUDA between events of the current stream. It is called for about `budget_seconds` before
    anything counts, the first time perhaps to compile, and for as long again.
    """
    for _ in range(WARM_UPS):
        call()
    once = max(timed(call, device), 1e-6)
    in_a_row, ahead = 1, 0.0
    if device.type == "cuda":
        in_a_row = max(1, int(SAMPLE_SECONDS / once))
        ahead = in_a_row * _host_seconds(call)
    samples = max(FEWEST, min(MOST, int(budget_seconds / (in_a_row * once + ahead))))
    found = [timed(call, device, in_a_row, ahead) for _ in range(2 * samples)]
    return median(found[samples:])


def _host_seconds(call: Callable[[], object]) -> float:
    """Return how long the host takes to launch a call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def timed(
    call: Callable[[], object], device: torch.device, in_a_row: int = 1, ahead: float = 0.0
) -> float:
    """Return the seconds of one call on the device, on average over some in a row.

    Args:
        call: what is timed.
        device: where it runs.
        in_a_row: how often it is called.
        ahead: seconds that the GPU waits for the host to get ahead, if more than usual.
    """
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(in_a_row):
            call()
        return (time.perf_counter() - began) / in_a_row
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    torch.cuda._sleep(int(max(ahead, AHEAD_SECONDS) * CYCLES_PER_SECOND))
    start.record()
    for _ in range(in_a_row):
        call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3 / in_a_row
