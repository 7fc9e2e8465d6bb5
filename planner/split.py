"""Split indivisible units over ranks of unequal speed, so that the last rank finishes soonest.

Tokens and query heads of a head-parallel group are both split by this model. Ranks of equal speed
and room form a class c of `num_ranks[c]`; `level[c]` is the most units one of them takes.

minimise    makespan                                                    [seconds, scaled]
subject to  sum_c num_ranks[c] * level[c] >= units                      all_units_taken
            seconds_per_unit[c] * level[c] <= makespan    for all c     class_c_finishes
            level[c] integer, 0 <= level[c] <= cap[c]

Data are scaled so that the answer lies near 100. The solver's answer is a start and no more: ranks
are filled up to its makespan, recomputed, and what they then hold too much is taken off one by one
from the rank that finishes last. From any makespan that suffices this ends at the least one.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from hexiseq_triton.errors import InfeasibleError

TOKEN_UNIT = 16
_SCALE = 100.0
_TOLERANCE = 1e-9

Class = tuple[float, int]
"""Seconds per unit, most units."""


def split_tokens(
    num_tokens: int,
    seconds_per_token: Sequence[float],
    caps: Sequence[int] | None = None,
    unit: int = TOKEN_UNIT,
) -> list[int]:
    """Return each rank's tokens: multiples of `unit`, the remainder on one of them.

    Where memory is too tight for whole blocks, tokens are split one by one.

    Args:
        num_tokens: tokens of the group.
        seconds_per_token: token-wise time of each rank.
        caps: most tokens each rank has memory for; no bound if left out.
        unit: tokens are split in blocks of so many.

    Raises:
        InfeasibleError: if the ranks together have no room for `num_tokens`.
    """
    caps = [num_tokens] * len(seconds_per_token) if caps is None else [max(0, c) for c in caps]
    if sum(caps) < num_tokens:
        raise InfeasibleError(
            f"ranks have room for {sum(caps)} tokens; {num_tokens} must be placed"
        )
    units, rest = divmod(num_tokens, unit)
    if sum(cap // unit for cap in caps) >= units:
        blocks = split_units(units, seconds_per_token, [cap // unit for cap in caps])
        tokens = [unit * count for count in blocks]
        for r in sorted(range(len(caps)), key=lambda r: (tokens[r] + rest) * seconds_per_token[r]):
            if tokens[r] + rest <= caps[r]:
                tokens[r] += rest
                return tokens
    return split_tokens(num_tokens, seconds_per_token, caps, unit=1)


def split_heads(num_heads: int, seconds_per_head: Sequence[float]) -> list[int]:
    """Return each rank's query heads; a slow rank may take none."""
    return split_units(num_heads, seconds_per_head, [num_heads] * len(seconds_per_head))


def split_units(units: int, seconds: Sequence[float], caps: Sequence[int]) -> list[int]:
    """Return each rank's units.

    Raises:
        InfeasibleError: if the caps add up to less than `units`.
    """
    caps = [min(cap, units) for cap in caps]
    if sum(caps) < units:
        raise InfeasibleError(f"ranks have room for {sum(caps)} units; {units} must be placed")
    fluid = units / sum(1 / rate for rate in seconds) if units else 1.0
    scaled = [rate * _SCALE / fluid for rate in seconds]
    classes = Counter(zip(scaled, caps, strict=True))
    makespan = _makespan(units, tuple(sorted(classes.items())))
    levels = [_level(makespan, *rank) for rank in zip(scaled, caps, strict=True)]
    return _without_surplus(units, scaled, levels)


def _level(makespan: float, seconds: float, cap: int) -> int:
    """Return the most units one rank takes within `makespan`."""
    return min(cap, math.floor(makespan / seconds * (1 + _TOLERANCE)))


@lru_cache(maxsize=4096)
def _makespan(units: int, classes: tuple[tuple[Class, int], ...]) -> float:
    """Return a makespan in which all units are taken: the solver's, recomputed."""
    levels = _solve(units, classes) if len(classes) > 1 else [-(-units // classes[0][1])]
    if _taken(levels, classes) >= units:
        return max(rate * level for ((rate, _), _), level in zip(classes, levels, strict=True))
    makespan = _SCALE
    while _taken([_level(makespan, *kind) for kind, _ in classes], classes) < units:
        makespan *= 2
    return makespan


def _taken(levels: Sequence[int], classes: Sequence[tuple[Class, int]]) -> int:
    return sum(count * level for (_, count), level in zip(classes, levels, strict=True))


def _solve(units: int, classes: Sequence[tuple[Class, int]]) -> list[int]:
    """Return the levels that python-mip finds for the model above."""
    from mip import CBC, INTEGER, Model, minimize, xsum  # slow to import

    model = Model(solver_name=CBC)
    model.verbose = 0
    model.threads = 1
    makespan = model.add_var("makespan")
    levels = []
    for c, ((rate, cap), _) in enumerate(classes):
        level = model.add_var(f"level_{c}", var_type=INTEGER, lb=0, ub=cap)
        model += rate * level <= makespan, f"class_{c}_finishes"
        levels.append(level)
    model += (
        xsum(count * level for (_, count), level in zip(classes, levels, strict=True)) >= units,
        "all_units_taken",
    )
    model.objective = minimize(makespan)
    model.optimize(max_nodes=2000)

    return [round(level.x) if model.num_solutions else 0 for level in levels]


def _without_surplus(units: int, seconds: Sequence[float], levels: Sequence[int]) -> list[int]:
    """Take units off the ranks that finish last, until `units` remain."""
    taken = list(levels)
    last = [
        (-rate * level, -r) for r, (rate, level) in enumerate(zip(seconds, levels, strict=True))
    ]
    heapq.heapify(last)
    for _ in range(sum(taken) - units):
        r = -heapq.heappop(last)[1]
        taken[r] -= 1
        heapq.heappush(last, (-seconds[r] * taken[r], -r))
    return taken
