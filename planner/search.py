"""The asymmetric family: groups of unequal size and mix, tokens and heads uneven inside each.

For each candidate grouping: heads over the ranks of each group by the MIP; a bound from computing
alone, which drops the grouping if a better layout is known; tokens over the groups until all take
equally long, communication included; at last tokens over the ranks of each group by the MIP.

A later search replaces this module: it takes a Problem and returns the Cost of its best layout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hexiseq_triton.errors import InfeasibleError
from hexiseq_triton.planner.bound import lower_bound_seconds
from hexiseq_triton.planner.cost import Cost, evaluate
from hexiseq_triton.planner.groupings import Grouping, groupings
from hexiseq_triton.planner.layouts import excess
from hexiseq_triton.planner.memory import group_token_caps, memory_model, token_caps
from hexiseq_triton.planner.partition import apportion
from hexiseq_triton.planner.problem import Group, Layout, Problem, Work, nested
from hexiseq_triton.planner.rates import Floats
from hexiseq_triton.planner.split import TOKEN_UNIT, split_heads, split_tokens
from hexiseq_triton.planner.traffic import Rows

_ROUNDS = 6
_CLOSE_TO_BOUND = 1.0005
"""A layout this near the bound ends the search."""
_ALIKE = 1.002
"""Groups whose times differ by less need no further round."""


@dataclass(frozen=True)
class _Candidate:
    """A grouping with its heads; `seconds_per_token` of each group counts computing alone."""

    name: str
    ranks: Grouping
    heads: tuple[tuple[int, ...], ...]
    seconds_per_token: tuple[float, ...]

    def layer_seconds(self, tokens: int) -> float:
        """Return what no deal of `tokens` to these groups can fall below, forward and backward."""
        return tokens / sum(1 / seconds for seconds in self.seconds_per_token)


@dataclass(frozen=True)
class _Seconds:
    """Computing seconds of one layer, forward and backward, by rank."""

    per_token: Floats
    per_head_and_token: Floats


def best_asymmetric(problem: Problem, to_beat: float = float("inf")) -> Cost | None:
    """Return the best layout's cost; if none fits in memory, the one closest to fitting.

    Args:
        to_beat: step seconds; groupings that cannot be faster are not looked at.
    """
    best: Cost | None = None
    workload = problem.workload
    passes = workload.accumulation * problem.model.layers
    least = _CLOSE_TO_BOUND * lower_bound_seconds(problem)
    for candidate in _candidates(problem):
        bound = max(least, passes * candidate.layer_seconds(workload.stream_tokens))
        if bound >= min(to_beat, best.step_seconds if best and best.fits else to_beat):
            break  # candidates come by rising bound
        cost = _dealt(problem, candidate)
        if best is None or _key(cost) < _key(best):
            best = cost
    return best


def fits(problem: Problem) -> bool:
    """Return whether any candidate fits in memory."""
    return any(
        evaluate(problem, Layout("", tuple(_with_tokens(problem, c, 1 / _array(c))))).fits
        for c in _candidates(problem)
    )


def _array(candidate: _Candidate) -> Floats:
    return np.array(candidate.seconds_per_token)


def _key(cost: Cost) -> tuple[bool, float]:
    return (not cost.fits, cost.step_seconds if cost.fits else excess(cost))


def _seconds(problem: Problem) -> _Seconds:
    workload, work, rates = problem.workload, problem.work, problem.rates
    again = 2 if workload.recompute == "full" else 1
    attention = again / rates.attention_forward + Work.BACKWARD_ATTENTION / rates.attention_backward
    return _Seconds(
        (again + Work.BACKWARD_LINEAR) * work.linear_per_token / rates.gemm,
        work.attention_per_pair * workload.pairs_per_token * attention,
    )


def _candidates(problem: Problem) -> list[_Candidate]:
    """Return all groupings with their heads, by rising bound."""
    seconds = _seconds(problem)
    alone = 1 / (seconds.per_token + problem.model.heads * seconds.per_head_and_token)
    split: dict[tuple[float, ...], tuple[int, ...]] = {}
    candidates = []
    for ranks, name in groupings(problem.cluster, alone.tolist()).items():
        heads, per_token = [], []
        for group in ranks:
            members = list(group)
            speeds = tuple(seconds.per_head_and_token[members].tolist())
            if speeds not in split:
                split[speeds] = tuple(split_heads(problem.model.heads, speeds))
            heads.append(split[speeds])
            slowest = float((np.array(speeds) * split[speeds]).max())
            per_token.append(slowest + 1 / float((1 / seconds.per_token[members]).sum()))
        candidates.append(_Candidate(name, ranks, tuple(heads), tuple(per_token)))
    tokens = problem.workload.stream_tokens
    return sorted(candidates, key=lambda candidate: candidate.layer_seconds(tokens))


def _dealt(problem: Problem, candidate: _Candidate) -> Cost:
    """Return the cost of a candidate with tokens dealt so that groups and ranks end together."""
    best = None
    per_token = _array(candidate)
    for _ in range(_ROUNDS):
        groups = _with_tokens(problem, candidate, 1 / per_token)
        cost = evaluate(problem, Layout(candidate.name, nested(groups)))
        if best is None or _key(cost) < _key(best):
            best = cost
        times = dict(zip((g.ranks for g in cost.layout.groups), cost.group_seconds, strict=True))
        seconds = np.array([times[group.ranks] for group in groups])
        if seconds.max() <= _ALIKE * seconds.mean():
            break
        per_token = seconds / np.array([max(group.num_tokens, 1) for group in groups])
    assert best is not None
    polished = evaluate(problem, _polished(problem, best.layout))
    return polished if polished.fits or not best.fits else best


def _with_tokens(problem: Problem, candidate: _Candidate, speeds: Floats) -> list[Group]:
    """Return the candidate's groups with tokens in proportion to group and rank speeds.

    Memory bounds both; where it cannot be met, it is left to the evaluator to say so.
    """
    empty = [
        Group(ranks, (0,) * len(ranks), heads)
        for ranks, heads in zip(candidate.ranks, candidate.heads, strict=True)
    ]
    rows, memory = Rows.of(problem, Layout("", tuple(empty))), memory_model(problem)
    unit = token_unit(problem)
    units, rest = divmod(problem.workload.stream_tokens, unit)
    group_caps = group_token_caps(problem, memory, rows) // unit
    tokens = [unit * count for count in _deal(units, speeds, group_caps)]
    tokens[int(np.argmax(tokens))] += rest

    caps = token_caps(problem, memory, replace(rows, group_tokens=np.array(tokens, dtype=float)))
    per_token = _seconds(problem).per_token[rows.rank]
    groups = []
    for group, count, start in zip(empty, tokens, rows.group_starts, strict=True):
        members = slice(start, start + len(group.ranks))
        shares = _deal(count, 1 / per_token[members], caps[members])
        groups.append(replace(group, tokens=tuple(shares)))
    return groups


def _deal(total: int, speeds: Floats, caps: Floats) -> list[int]:
    """Deal in proportion to speed, at most `caps` to each; caps too small in all are ignored."""
    room = np.maximum(caps, 0.0).astype(np.int64)
    if room.sum() < total:
        room[:] = total
    shares = np.zeros(len(speeds), dtype=np.int64)
    free = room > 0
    while free.any():
        weights = np.rint(speeds[free] / speeds[free].max() * 1e9).astype(np.int64)
        shares[free] = apportion(total - int(shares[~free].sum()), weights.tolist())
        over = free & (shares > room)
        if not over.any():
            break
        shares[over] = room[over]
        free &= ~over
    return [int(share) for share in shares]


def _polished(problem: Problem, layout: Layout) -> Layout:
    """Return the layout with each group's tokens split over its ranks by the MIP."""
    rows = Rows.of(problem, layout)
    caps = token_caps(problem, memory_model(problem), rows)
    per_token = _seconds(problem).per_token
    groups = []
    for group, start in zip(layout.groups, rows.group_starts, strict=True):
        most = [int(cap) for cap in caps[start : start + len(group.ranks)]]
        seconds = per_token[list(group.ranks)].tolist()
        try:
            tokens = split_tokens(group.num_tokens, seconds, most, token_unit(problem))
        except InfeasibleError:
            tokens = list(group.tokens)
        groups.append(replace(group, tokens=tuple(tokens)))
    return replace(layout, groups=tuple(groups))


def token_unit(problem: Problem) -> int:
    """Return the block in which tokens are dealt: single tokens for very short streams."""
    short = problem.workload.stream_tokens < 4 * TOKEN_UNIT * problem.cluster.world_size
    return 1 if short else TOKEN_UNIT
