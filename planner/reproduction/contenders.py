"""What is compared: layouts of ours, and of every baseline, each the best few by the cost model.

The paper's ring, zigzag ring and USP may exchange keys as the runtime does or round a ring, as
their libraries do; whichever is faster counts. `_ALSO` names where the latter stand among the
planner's baselines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hexiseq_triton.errors import InfeasibleError
from hexiseq_triton.planner.cost import Cost
from hexiseq_triton.planner.layouts import BASELINES, excess, out_of_memory
from hexiseq_triton.planner.lineup import Lineup
from hexiseq_triton.planner.problem import Problem
from hexiseq_triton.planner.reproduction.judge import distinct
from hexiseq_triton.planner.tuner import Tuner
from hexiseq_triton.planner.warm_up import warm_up

LAYOUTS = 96
"""Of our layouts, so many of the best by the cost model are simulated."""
GRIDS = 12
"""The same of each baseline."""
SLOWER = 1.1
"""Allotments are looked at up to so many times the step that the cost model thinks best."""
_ALSO = {
    "zigzag_ring": ("megatron_p2p",),
    "usp": ("megatron_p2p", "megatron_a2a_p2p"),
}


@dataclass(frozen=True)
class Contenders:
    """The layouts of one problem, fastest first by the cost model; all fit in memory.

    Attributes:
        problem: theirs.
        ours: what the search looked at.
        baselines: of each baseline, none where `reasons` say why.
        reasons: why a baseline has no layout.
    """

    problem: Problem
    ours: Sequence[Cost]
    baselines: dict[str, Sequence[Cost]]
    reasons: dict[str, str]

    @classmethod
    def of(cls, problem: Problem) -> Contenders:
        warm_up()
        baselines, reasons = _baselines(problem)
        executable = [c for costs in baselines.values() for c in costs if c.layout.executable]
        return cls(problem, _searched(problem, executable), baselines, reasons)

    @property
    def all_baselines(self) -> list[Cost]:
        """All baselines' layouts."""
        return [cost for costs in self.baselines.values() for cost in costs]

    @property
    def runnable(self) -> list[Cost]:
        """All layouts that the runtime can carry out."""
        return [*self.ours, *(cost for cost in self.all_baselines if cost.layout.executable)]

    def of_baseline(self, name: str) -> list[Cost]:
        """Return a baseline's layouts, with those of libraries whose exchange is a ring."""
        names = (name, *_ALSO.get(name, ()))
        return [cost for each in names for cost in self.baselines.get(each, ())]


def _searched(problem: Problem, executable: Sequence[Cost]) -> list[Cost]:
    lineup = Lineup(problem)
    best = lineup.best(min(executable, key=_seconds, default=None))
    below = SLOWER * best.step_seconds if best.fits else float("inf")
    return fastest([best, *lineup.layouts(below)], LAYOUTS)


def _baselines(problem: Problem) -> tuple[dict[str, Sequence[Cost]], dict[str, str]]:
    tuner = Tuner(problem, GRIDS)
    found: dict[str, Sequence[Cost]] = {}
    reasons: dict[str, str] = {}
    for name, layouts_of in BASELINES.items():
        try:
            costs = layouts_of(tuner)
        except InfeasibleError as error:
            reasons[name] = str(error)
            continue
        found[name] = fastest(costs, GRIDS)
        if not found[name]:
            reasons[name] = out_of_memory(problem, min(costs, key=excess))
    return found, reasons


def fastest(costs: Iterable[Cost], count: int) -> list[Cost]:
    """Return so many different layouts that fit in memory, fastest first by the cost model."""
    fitting = [cost for cost in costs if cost.fits]
    return list(distinct(sorted(fitting, key=_seconds)))[:count]


def _seconds(cost: Cost) -> float:
    return cost.step_seconds
