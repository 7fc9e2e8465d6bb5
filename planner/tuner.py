"""The best grid of a kind: shapes pruned by a bound, the rest evaluated side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from hexiseq_triton.planner.cost import Cost, evaluate
from hexiseq_triton.planner.grid_bounds import excesses, least_seconds
from hexiseq_triton.planner.grids import Grid, Ranks, Shape, estimated_seconds, orders
from hexiseq_triton.planner.problem import Problem

_SHAPES_AT_FIRST, _MORE = 4, 4
"""The best bounds come first, then so many times as many: most shapes fall to those before."""
_ROWS_AT_ONCE = 1 << 13
"""Rows of grids evaluated side by side: enough to hide the cost of a call, and still in cache."""


@dataclass
class Tuner:
    """Finds the best of a baseline's layouts, and remembers what it has looked at."""

    problem: Problem
    kept: int = 1
    """How many of a kind's fastest grids are returned."""
    _seconds: dict[Grid, float] = field(default_factory=dict)
    _costs: dict[Grid, Cost] = field(default_factory=dict)
    _tried: dict[Ranks, dict[str, Ranks]] = field(default_factory=dict)

    @property
    def ranks(self) -> Ranks:
        """All ranks of the cluster."""
        return tuple(range(self.problem.cluster.world_size))

    def best_grid(
        self, wanted: Iterable[Shape], ranks: Ranks, to_beat: float = float("inf")
    ) -> list[Cost]:
        """Return the costs of the fastest grids that fit, or that of the nearest to fitting.

        Shapes come by rising bound, until none left can beat those kept so far; each in all orders
        of the ranks. Wanted shapes have one arrangement and one exchange. None is returned if none
        can beat `to_beat` seconds.
        """
        problem = self.problem
        shapes = list(wanted)
        needed = excesses(problem, shapes, ranks)
        fitting = [shape for shape, most in zip(shapes, needed, strict=True) if most <= 1]
        if not fitting:
            return [self._cost(Grid(shapes[int(needed.argmin())], ranks))]
        bounds = least_seconds(problem, fitting, ranks)
        seconds: dict[Grid, float] = {}
        start, at_once = 0, _SHAPES_AT_FIRST
        by_bound = np.argsort(bounds, kind="stable").tolist()
        while start < len(by_bound):
            known = sorted(seconds.values())[: self.kept]
            best = min(to_beat, known[-1] if len(known) == self.kept else float("inf"))
            grids = [
                Grid(fitting[at], order, suffix)
                for at in by_bound[start : start + at_once]
                if bounds[at] < best
                for suffix, order in self._orders(ranks).items()
            ]
            if not grids:
                break
            seconds |= self._estimated(grids)
            start += at_once
            at_once = min(_MORE * at_once, max(1, _ROWS_AT_ONCE // len(ranks)))
        return self._first_fitting(sorted(seconds, key=lambda grid: seconds[grid]))

    def _orders(self, ranks: Ranks) -> dict[str, Ranks]:
        if ranks not in self._tried:
            self._tried[ranks] = orders(self.problem, ranks)
        return self._tried[ranks]

    def _estimated(self, grids: Sequence[Grid]) -> dict[Grid, float]:
        new = [grid for grid in grids if grid not in self._seconds]
        if new:
            found = estimated_seconds(self.problem, new).tolist()
            self._seconds |= dict(zip(new, found, strict=True))
        return {grid: self._seconds[grid] for grid in grids}

    def _first_fitting(self, by_seconds: Sequence[Grid]) -> list[Cost]:
        """Return the first ones that fit with whole tokens; the first if none does."""
        fitting = (cost for cost in map(self._cost, by_seconds) if cost.fits)
        return list(islice(fitting, self.kept)) or [self._cost(grid) for grid in by_seconds[:1]]

    def _cost(self, grid: Grid) -> Cost:
        if grid not in self._costs:
            self._costs[grid] = evaluate(self.problem, grid.layout(self.problem))
        return self._costs[grid]
