"""The longest sequence that fits in memory: the longest for which `plan` has an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hexiseq_triton.planner.capacity import most_tokens, roomiest
from hexiseq_triton.planner.layouts import prices
from hexiseq_triton.planner.problem import Problem
from hexiseq_triton.planner.search import Search
from hexiseq_triton.planner.stages import Splitter
from hexiseq_triton.planner.workload import MOST_TOKENS

_STEP = 16
"""The longest sequence is found to so many tokens, or to a thousandth."""


def longest_seq_len(problem: Problem) -> int:
    """Return the longest sequence for which there is a plan, a multiple of 16; 0 if there is none.

    The roomiest layout says how long it is, in milliseconds. The search, which looks at many more
    layouts and takes tenths, is then asked a little further on and far beyond: it finds nothing
    there, or the answer rises. What fits is taken to fit at all shorter lengths, though rounding
    to blocks and heads may let a length fit in between where others don't.

    The problem's own seq_len is not looked at, nor its documents.
    """

    def asking(fits: Callable[[Problem], bool]) -> Callable[[int], bool]:
        def at(seq_len: int) -> bool:
            if seq_len > MOST_TOKENS:
                return False
            workload = replace(problem.workload, seq_len=seq_len, documents=None)
            return fits(replace(problem, workload=workload))

        return at

    has_plan = asking(_has_plan)
    longest = _last(asking(_roomiest_fits), 0)
    while True:
        too_long = None
        for further in _further(longest):
            if has_plan(further):
                break
            too_long = further
        else:
            return longest
        longest = _last(has_plan, further, too_long)


def _further(longest: int) -> tuple[int, ...]:
    """Return longer lengths to ask about, the farthest first: twice as long, and 2 and 1 %."""
    blocks = longest // _STEP
    further = blocks + max(1, blocks // 100), blocks + blocks // 50 + 128, 2 * blocks + 64
    return tuple(_STEP * more for more in reversed(further))


def _roomiest_fits(problem: Problem) -> bool:
    return roomiest(Splitter(problem)).fits


def _has_plan(problem: Problem) -> bool:
    """Return whether `plan` finds a layout that fits and that the runtime can carry out."""
    workload = problem.workload
    tokens = workload.step_tokens // workload.accumulations[-1]
    if most_tokens(problem, range(problem.cluster.world_size)) < tokens:
        return False
    if _roomiest_fits(problem):  # what the search falls back to
        return True
    if any(priced.executable for priced in prices(problem).values()):
        return True
    return Search(problem).best().fits


def _last(fits: Callable[[int], bool], low: int, high: int | None = None) -> int:
    """Return the last length that fits, from `low`, which does or is 0, to `high`, which doesn't.

    Without `high`, lengths are doubled until one does not fit.
    """
    if high is None:
        high = max(_STEP, 2 * low)
        while fits(high):
            low, high = high, 2 * high
    while high - low > max(_STEP, low // 1000):
        middle = (low + high) // 2 // _STEP * _STEP
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
