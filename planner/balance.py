"""Stage II's last step: tokens over the groups of a replica, until all groups end together.

A group's layer takes c_g L_g, which stage III knows, and what the exchange adds to it, e_g, which
the evaluator knows for the L_g it was asked about. With e_g held, the time T at which

    sum_g (T - e_g) / c_g = N

gives new L_g, within memory; e_g is then taken anew. It falls as a group's own tokens grow, so
this may circle: the best of a few rounds counts. In contiguous runs a token's work depends on its
place; there a group's time counts as proportional to its tokens.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

from hexiseq_triton.planner.cost import Cost
from hexiseq_triton.planner.layouts import excess
from hexiseq_triton.planner.problem import Replica, nested
from hexiseq_triton.planner.rates import Floats
from hexiseq_triton.planner.stages import Frame, Ranks, Splitter, whole_units

_ALIKE = 1.0005
"""Groups whose times differ by less need no further round."""


@dataclass(frozen=True)
class Dealing:
    """One replica whose tokens are to be dealt to groups.

    Attributes:
        name: of the layout.
        grouping: ranks of each group.
        sequences: of the replica, in one pass.
        rounds: evaluations at most.
        quick: split the groups without what couples tokens and heads.
        start: tokens of each group to begin with; in proportion to speed if left out.
        in_order: nest the groups as they are given, as contiguous runs always are; else the
            largest outermost.
    """

    name: str
    grouping: Sequence[Ranks]
    sequences: int
    rounds: int
    quick: bool = False
    start: Sequence[float] | None = None
    in_order: bool = False


def balanced(splitter: Splitter, frame: Frame, dealing: Dealing) -> Cost:
    """Return the cost of the replica, all other ranks idle."""
    return balanced_apart(splitter, frame, [dealing])[0]


def balanced_apart(splitter: Splitter, frame: Frame, dealings: Sequence[Dealing]) -> list[Cost]:
    """Return the cost of each replica alone; they are evaluated side by side, round by round.

    Args:
        splitter: the problem.
        frame: passes and arrangement; the name is the dealing's.
        dealings: the replicas.
    """
    running = {at: _rounds(splitter, frame, dealing) for at, dealing in enumerate(dealings)}
    asked = {at: next(rounds) for at, rounds in running.items()}
    best: dict[int, Cost] = {}
    while asked:
        names = [dealings[at].name for at in asked]
        costs = splitter.judged_apart(frame, list(asked.values()), names)
        for at, cost in zip(list(asked), costs, strict=True):
            if at not in best or key(cost) < key(best[at]):
                best[at] = cost
            try:
                asked[at] = running[at].send(cost)
            except StopIteration:
                del asked[at]
    return [best[at] for at in range(len(dealings))]


def _rounds(splitter: Splitter, frame: Frame, dealing: Dealing) -> Generator[Replica, Cost, None]:
    """Yield the replica with tokens over its groups, and anew for each cost that is sent back."""
    grouping = dealing.grouping
    total = dealing.sequences * splitter.problem.workload.seq_len
    alone = len(grouping) == 1
    keep = dealing.in_order or frame.arrangement == "contiguous"
    rates = splitter.alone
    speed = np.array([sum([rates[r] for r in ranks]) for ranks in grouping])
    caps = np.array([splitter.room_for_tokens(ranks, alone) for ranks in grouping])
    start = speed / speed.sum() * total if dealing.start is None else np.array(dealing.start, float)
    shares = _capped(total, start, speed, caps)
    for _ in range(1 if alone else dealing.rounds):
        tokens = whole_units(total, shares.tolist(), splitter.unit)
        splits = [
            splitter.split(ranks, count, alone, dealing.quick)
            for ranks, count in zip(grouping, tokens, strict=True)
        ]
        groups = tuple(group for group, _ in splits)
        cost = yield Replica(groups if keep else nested(groups), dealing.sequences)
        times = dict(zip((g.ranks for g in cost.layout.groups), cost.group_seconds, strict=True))
        seconds = np.array([times[ranks] for ranks in grouping])
        if seconds.max() <= _ALIKE * seconds.min():
            break
        own = np.array([seconds for _, seconds in splits])
        if frame.arrangement == "contiguous":
            own = seconds
        held = np.array(tokens, dtype=float)
        per_token = np.where(held > 0, own / np.maximum(held, 1.0), 1 / speed)
        extra = seconds - np.minimum(own, seconds)
        shares = _until_together(total, per_token, extra, caps)


def key(cost: Cost) -> tuple[bool, float]:
    """Order costs: those that fit by time, then the others by how far they are from fitting."""
    return (not cost.fits, cost.step_seconds if cost.fits else excess(cost))


def _until_together(total: int, per_token: Floats, extra: Floats, caps: Floats) -> Floats:
    """Return shares with which all groups that have any end together."""
    used = np.ones(len(per_token), dtype=bool)
    while True:
        end = (total + (extra[used] / per_token[used]).sum()) / (1 / per_token[used]).sum()
        late = used & (extra >= end)
        if not late.any():
            break
        used &= ~late
    shares = np.where(used, np.maximum(0.0, end - extra) / per_token, 0.0)
    return _capped(total, shares, 1 / per_token, caps)


def _capped(total: int, shares: Floats, speed: Floats, caps: Floats) -> Floats:
    """Return shares within the caps, the rest by speed; caps too small in all are ignored."""
    if caps.sum() <= total:
        result: Floats = caps + (total - caps.sum()) * speed / speed.sum()
        return result
    shares = shares.copy()
    full = shares > caps
    while full.any():
        shares[full] = caps[full]
        free = ~full
        lacking = total - shares.sum()
        if lacking <= 0 or not free.any():
            break
        shares[free] += lacking * speed[free] / speed[free].sum()
        over = free & (shares > caps)
        if not over.any():
            break
        full |= over
    return shares
