"""Split indivisible units over the ranks of a group, so that its two phases end soonest. Exact.

Tokens and query heads of a head-parallel group are both such units, and each costs a forward and a
backward phase in which the group waits for its last rank:

    minimise    max_r forward[r] * n[r]  +  max_r backward[r] * n[r]           [seconds]
    subject to  sum_r n[r] = units,  0 <= n[r] <= cap[r],  n[r] integer

With one maximum, the least level at which all units find room answers it: the fluid level, and from
there unit by unit to the rank that would end first. With two, the forward levels are scanned
upwards from their least; each caps the ranks for the backward phase. The scan ends where the least
backward maximum alone leaves no gain. Where forward and backward are proportional, as they are for
rates that come from one peak, the first step is all.
"""

from __future__ import annotations

import numba
import numpy as np

from hexiseq_triton.planner.rates import Floats, Ints

TOKEN_UNIT = 16
_ROUNDING = 1e-12
"""Relative slack of a level, so that the rank that sets it keeps its own units."""
_MOST_LEVELS = 2000
"""Forward levels scanned at most; only rates measured one by one come near it."""


@numba.njit(cache=True)
def place_tokens(num_tokens: int, forward: Floats, backward: Floats, caps: Ints, unit: int) -> Ints:
    """Return each rank's tokens: in whole units, the remainder on the rank that then ends first.

    Where the caps leave too little room for whole units, tokens are placed one by one.

    Args:
        num_tokens: to be placed.
        forward: [ranks], seconds a token takes.
        backward: [ranks], seconds it takes in the second phase.
        caps: [ranks], most tokens of each.
        unit: tokens in a block.

    Returns:
        [ranks] tokens; -1 everywhere if the caps add up to fewer than `num_tokens`.
    """
    rest = num_tokens % unit
    counts = unit * place(num_tokens // unit, forward, backward, caps // unit)
    if counts[0] >= 0:
        taker, soonest = -1, np.inf
        for r in range(len(caps)):
            end = (forward[r] + backward[r]) * (counts[r] + rest)
            if counts[r] + rest <= caps[r] and end < soonest:
                taker, soonest = r, end
        if taker >= 0:
            counts[taker] += rest
            return counts
    if unit == 1:
        return counts
    return place(num_tokens, forward, backward, caps)


@numba.njit(cache=True)
def place(units: int, forward: Floats, backward: Floats, caps: Ints) -> Ints:
    """Return each rank's units for the least sum of the two maxima.

    Args:
        units: to be placed.
        forward: [ranks], seconds a unit takes.
        backward: [ranks], seconds it takes in the second phase.
        caps: [ranks], most units of each.

    Returns:
        [ranks] units; -1 everywhere if the caps add up to fewer than `units`.
    """
    if _proportional(forward, backward):
        return _filled(units, forward + backward, caps)
    best = _filled(units, backward, caps)
    if best[0] < 0:
        return best
    least_backward = _most(backward, best)
    total = _most(forward, best) + least_backward
    room = caps.copy()
    level = _most(forward, _filled(units, forward, caps))
    for _ in range(_MOST_LEVELS):
        if level + least_backward >= total:
            break
        for r in range(len(caps)):
            room[r] = min(caps[r], int(level / forward[r] * (1 + _ROUNDING)))
        counts = _filled(units, backward, room)
        found = _most(forward, counts) + _most(backward, counts)
        if found < total:
            best, total = counts, found
        following = np.inf
        for r in range(len(caps)):
            if room[r] < caps[r]:
                following = min(following, (room[r] + 1) * forward[r])
        level = following
    return best


@numba.njit(cache=True)
def _proportional(forward: Floats, backward: Floats) -> bool:
    for r in range(1, len(forward)):
        if abs(forward[r] * backward[0] - forward[0] * backward[r]) > 1e-12 * forward[r] * (
            backward[0] + 1e-300
        ):
            return False
    return True


@numba.njit(cache=True)
def _most(seconds: Floats, counts: Ints) -> float:
    most = 0.0
    for r in range(len(counts)):
        most = max(most, seconds[r] * counts[r])
    return most


@numba.njit(cache=True)
def _filled(units: int, seconds: Floats, caps: Ints) -> Ints:
    """Return each rank's units for the least maximum; -1 everywhere if they don't fit."""
    room = np.maximum(caps, 0)
    if room.sum() < units:
        return np.full(len(caps), -1, dtype=np.int64)
    counts = _below_fluid_level(units, seconds, room)
    for _ in range(units - counts.sum()):
        taker, soonest = -1, np.inf
        for r in range(len(room)):
            end = seconds[r] * (counts[r] + 1)
            if counts[r] < room[r] and end < soonest:
                taker, soonest = r, end
        counts[taker] += 1
    return counts


@numba.njit(cache=True)
def _below_fluid_level(units: int, seconds: Floats, room: Ints) -> Ints:
    """Return what each rank has done when all together could have done `units` in fractions."""
    counts = np.zeros(len(room), dtype=np.int64)
    full = np.zeros(len(room), dtype=np.bool_)
    while True:
        rate, left = 0.0, float(units)
        for r in range(len(room)):
            if full[r]:
                left -= room[r]
            else:
                rate += 1 / seconds[r]
        again = False
        for r in range(len(room)):
            if not full[r] and left / rate / seconds[r] >= room[r]:
                full[r] = again = True
        if not again:
            break
    for r in range(len(room)):
        counts[r] = room[r] if full[r] else int(left / rate / seconds[r] * (1 - _ROUNDING))
    return counts
