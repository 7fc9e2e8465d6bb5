"""A kernel that keeps multiprocessors to itself, as a collective does while a slow link is busy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl

_START_S = 10.0
_WARPS = 8  # with as many, no attention kernel of one program a multiprocessor fits beside it


@triton.jit
def _hold_kernel(begun, stop, nanoseconds):
    tl.store(begun + tl.program_id(0), 1)
    start = _now()
    while (tl.load(stop, volatile=True) == 0) & (_now() - start < nanoseconds):
        asked = _now()  # seldom: questions to the host's memory slow down what runs beside this
        while _now() - asked < 100_000:
            pass


@triton.jit
def _now():
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@contextmanager
def held(multiprocessors: int, longest_s: float = 30.0) -> Iterator[None]:
    """Keep that many multiprocessors busy meanwhile, for `longest_s` at most.

    What runs inside must have run before: to load a kernel or to get memory can wait for the card.
    Where processes share a card it can happen that nothing else of this one runs meanwhile.

    Raises:
        TimeoutError: if they do not all begin, or were free again before the end.
    """
    if not multiprocessors:
        yield
        return
    begun = torch.zeros(multiprocessors, dtype=torch.int32).pin_memory()
    stop = torch.zeros(1, dtype=torch.int32).pin_memory()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        grid = (multiprocessors,)
        _hold_kernel[grid](begun, stop, int(longest_s * 1e9), num_warps=_WARPS)
    start = time.monotonic()
    try:
        while int(begun.sum()) < multiprocessors:
            if time.monotonic() - start > _START_S:
                raise TimeoutError(f"of {multiprocessors} programs {int(begun.sum())} have begun")
        yield
        if stream.query():
            took = time.monotonic() - start
            raise TimeoutError(f"processors were held for {longest_s:g} s of {took:g}")
    finally:
        stop.fill_(1)
        stream.synchronize()
