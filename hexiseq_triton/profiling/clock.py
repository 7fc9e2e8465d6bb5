"""Time something on this rank's device."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

WARM_UPS = 2
FEWEST, MOST = 3, 40
"""Calls that are timed."""
AHEAD_CYCLES = 6_000_000
"""What the GPU waits before a timed call, a few milliseconds in which the host gets ahead: in
training it is ahead, too."""


def median_seconds(
    call: Callable[[], object], device: torch.device, budget_seconds: float
) -> float:
    """Return the median seconds of `call` on the device, after a warm-up.

    On CUDA between events of the current stream. It is called as often as `budget_seconds` allows;
    the first call, which may compile, doesn't count.
    """
    for _ in range(WARM_UPS):
        call()
    once = timed(call, device)
    rounds = max(FEWEST, min(MOST, int(budget_seconds / max(once, 1e-6))))
    return median(timed(call, device) for _ in range(rounds))


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call on the device."""
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    torch.cuda._sleep(AHEAD_CYCLES)
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3
