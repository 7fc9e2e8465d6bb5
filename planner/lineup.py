"""Layouts for another judge than the evaluator: what the search looks at, without choosing.

The evaluator adds up closed forms, and transfers that get in each other's way cost less there than
in the simulator. Whoever judges by that one needs more than the evaluator's favourite.
"""

from __future__ import annotations

from collections.abc import Iterator

from hexiseq_triton.planner.cost import Cost
from hexiseq_triton.planner.problem import Arrangement
from hexiseq_triton.planner.replicas import Allotment, Pool
from hexiseq_triton.planner.search import Search
from hexiseq_triton.planner.stages import Frame

_MOST_ALLOTMENTS = 32
"""Of allotments, that many are looked at: several times as many layouts."""


class Lineup(Search):
    """A search that lines its layouts up."""

    def layouts(self, below: float) -> list[Cost]:
        """Return layouts of the allotments whose bounds are lowest, and below so many seconds.

        For each: the best grouping at first look of all its pools, then the second best of all, and
        so on; in contiguous runs too, where communication shows. Some may exceed memory.
        """
        found: list[Cost] = []
        hopeful = [each for each in self._allotments() if each.seconds < below]
        for allotment in sorted(hopeful, key=lambda each: each.seconds)[:_MOST_ALLOTMENTS]:
            ranked = list(self._ranked(allotment, "balanced"))
            if self._tries_contiguous(allotment, ranked[0]):
                ranked += self._ranked(allotment, "contiguous")
            found += ranked
        return found

    def _ranked(self, allotment: Allotment, arrangement: Arrangement) -> Iterator[Cost]:
        frame = Frame("", allotment.accumulation, arrangement)
        pools = [self._first_alike(pool) for pool in allotment.pools]
        for place in range(max(len(self._looked_at(pool, frame)) for pool in pools)):

            def look(pool: Pool, frame: Frame, place: int = place) -> Cost:
                looks = self._looked_at(pool, frame)
                return looks[min(place, len(looks) - 1)][0]

            yield self._layout(allotment, arrangement, look)
