"""The plan by the simulator: the fastest there of the best layouts, and how far ahead it fetches.

The cost model adds up closed forms, and knows little of transfers that get in each other's way.
Where a NIC is at work for most of a layer, it has to begin while ranks still work on their own
keys: with more chunks in a round more keys are under way by then, if memory has room for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hexiseq_triton.planner.cost import Cost, evaluate
from hexiseq_triton.planner.problem import Problem
from hexiseq_triton.planner.reproduction.contenders import Contenders
from hexiseq_triton.planner.reproduction.judge import Judge
from hexiseq_triton.planner.simulator import simulate

WINDOWS = (4, 8)
"""Chunks in a round that are tried beside the default."""
_WIDEST_DECIDED = 3
"""Of layouts with wider windows, so many of the fastest by the fast engine are left to decide."""
_GAIN = 0.99
"""A wider window has to make a step this much shorter: it takes memory."""


def simulated(problem: Problem) -> tuple[Cost, str] | None:
    """Return the fastest layout in the simulator with what it says of it; None if none fits."""
    runnable, judge = Contenders.of(problem).runnable, Judge("direct")
    if problem.workload.documents is not None:  # the search took their work as even
        runnable = [evaluate(cost.problem, cost.layout) for cost in runnable]
    ranked = judge.ranked(runnable)
    if not ranked:
        return None
    first = judge.judged(min(runnable, key=lambda cost: cost.step_seconds)).seconds
    chosen, seconds = ranked[0].cost, ranked[0].seconds
    wide = [cost for each in ranked for cost in _with_wider_windows(each.cost)]
    fast = sorted(wide, key=lambda cost: simulate(cost, engine="fast").step_seconds)
    for cost in fast[:_WIDEST_DECIDED]:
        found = simulate(cost, engine="event").step_seconds
        if found < _GAIN * seconds:
            chosen, seconds = cost, found
    return chosen, (
        f"chosen by the simulator: there a step takes {seconds:.4g} s, and one of the layout that "
        f"the cost model likes best {first:.4g} s"
    )


def _with_wider_windows(cost: Cost) -> Iterator[Cost]:
    if not cost.rows.exchanges.any():
        return
    for window in WINDOWS:
        exchange = replace(cost.problem.exchange, window=window)
        wider = evaluate(replace(cost.problem, exchange=exchange), cost.layout)
        if wider.fits:
            yield wider
