"""The judge: the simulator, fast engine first, then the event engine on the finalists."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from hexiseq_triton.planner.cost import Cost
from hexiseq_triton.planner.plans import Exchange
from hexiseq_triton.planner.problem import Layout
from hexiseq_triton.planner.simulator import Engine, Mode, Simulation, simulate

ENGINE: Engine = "event"
"""The one that decides."""
FINALISTS = 8
"""Of the layouts that are fastest by the fast engine, so many are left to decide among."""
_OPTIMISTIC = 1.1
"""The cost model's time is hardly so many times the simulator's."""
_APART = 1.1
"""The fast engine's time is hardly so many times the event engine's."""

_KEPT: tuple[Exchange, ...] = ("double_ring", "all_gather")
"""Exchanges that no mode replaces."""


@dataclass(frozen=True)
class Judged:
    """A layout with seconds of its step."""

    cost: Cost
    seconds: float


@dataclass
class Judge:
    """Simulates layouts of one problem in one mode; what it has seen, it remembers.

    In "direct" every layout exchanges keys its own way; in the others rings, and ours, by the mode.
    """

    mode: Mode
    _fast: dict[Layout, float] = field(default_factory=dict)
    _decided: dict[Layout, float] = field(default_factory=dict)

    def fastest(self, costs: Iterable[Cost]) -> Judged | None:
        """Return the fastest layout; None if none fits in memory."""
        return next(iter(self.ranked(costs)), None)

    def ranked(self, costs: Iterable[Cost]) -> list[Judged]:
        """Return the fastest few layouts that fit in memory, the fastest first."""
        found: list[Judged] = []
        for cost in self._finalists(costs):
            best = min((each.seconds for each in found), default=math.inf)
            if self._fast_seconds(cost) > _APART * best:
                break
            found.append(self.judged(cost))
        return sorted(found, key=lambda each: each.seconds)

    def judged(self, cost: Cost) -> Judged:
        """Return a layout with its step."""
        layout = nameless(cost.layout)
        if layout not in self._decided:
            self._decided[layout] = self.simulated(cost).step_seconds
        return Judged(cost, self._decided[layout])

    def simulated(self, cost: Cost, engine: Engine = ENGINE) -> Simulation:
        """Return the layout's step in the mode, or by its own exchange if it keeps that."""
        keeps = self.mode == "direct" or cost.layout.exchange in _KEPT
        return simulate(cost, mode=None if keeps else self.mode, engine=engine)

    def exchanges_so(self, cost: Cost) -> bool:
        """Return whether a layout's keys travel as the mode says, and so as ours do."""
        exchange = cost.layout.exchange
        return exchange == "routes" if self.mode == "direct" else exchange not in _KEPT

    def _finalists(self, costs: Iterable[Cost]) -> list[Cost]:
        """Return the layouts that are fastest by the fast engine, and fit in memory."""
        times: list[tuple[float, int, Cost]] = []
        best = math.inf
        for place, cost in enumerate(distinct(sorted(costs, key=lambda c: c.step_seconds))):
            if cost.step_seconds > _OPTIMISTIC * best:
                break
            seconds = self._fast_seconds(cost)
            best = min(best, seconds)
            if seconds < math.inf:
                times.append((seconds, place, cost))
        return [cost for _, _, cost in sorted(times, key=lambda entry: entry[:2])[:FINALISTS]]

    def _fast_seconds(self, cost: Cost) -> float:
        """Return the step by the fast engine; infinite if it does not fit in memory."""
        layout = nameless(cost.layout)
        if layout not in self._fast:
            found = self.simulated(cost, "fast")
            fits = bool((found.memory_bytes <= cost.memory_limit).all())
            self._fast[layout] = found.step_seconds if fits else math.inf
        return self._fast[layout]


def nameless(layout: Layout) -> Layout:
    """Return the layout without its name: alike layouts are equal then."""
    return replace(layout, name="")


def distinct(costs: Iterable[Cost]) -> Iterator[Cost]:
    """Yield the first of each layout."""
    seen: set[Layout] = set()
    for cost in costs:
        layout = nameless(cost.layout)
        if layout not in seen:
            seen.add(layout)
            yield cost
