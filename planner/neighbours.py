"""Neighbours of a replica whose ranks stay where they are: tokens and heads move.

Stage III splits a group without seeing the exchange between groups. It prefers few ranks where an
all-to-all is dear, and the exchange prefers many, since each then fetches fewer heads. So a small
group is offered in several splits: with what couples tokens and heads and without, and with each
choice of its ranks at work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product

from hexiseq_triton.planner.partition import apportion
from hexiseq_triton.planner.problem import Group
from hexiseq_triton.planner.stages import Ranks, Splitter

FEW = 4
"""Tokens go to so many groups, the fastest. So few groups trade tokens from any to any, and of so
few ranks all choices are put to work."""

Groups = tuple[Group, ...]


def tokens_moved(splitter: Splitter, groups: Groups, seconds: Sequence[float]) -> Iterator[Groups]:
    """Yield groups after blocks of tokens went from the slowest to the fastest ones.

    Of few groups, from any to any: forward and backward may have different slowest groups.
    """
    for giver, taker, step in _trades(splitter, groups, seconds, parts=2):
        resplit = {
            g: splitter.split(groups[g].ranks, groups[g].num_tokens + more, alone=False)[0]
            for g, more in ((giver, -step), (taker, step))
        }
        yield tuple(resplit.get(g, group) for g, group in enumerate(groups))


def two_moves(splitter: Splitter, groups: Groups, seconds: Sequence[float]) -> Iterator[Groups]:
    """Yield groups two moves away: another split and a move in it, or a trade and other splits."""
    for g, group in enumerate(groups):
        if len(group.ranks) <= FEW:
            for changed in _crossed(splitter, group):
                yield (*groups[:g], changed, *groups[g + 1 :])
        for other in splits(splitter, group, group.num_tokens, alone=len(groups) == 1):
            for changed in _shifted_ranks(splitter, other):
                yield (*groups[:g], changed, *groups[g + 1 :])
    for giver, taker, step in _trades(splitter, groups, seconds, parts=8):
        offered = (
            _resplit(splitter, groups, g, more) for g, more in ((giver, -step), (taker, step))
        )
        for given, taken in product(*offered):
            resplit = {giver: given, taker: taken}
            yield tuple(resplit.get(g, group) for g, group in enumerate(groups))


def _trades(
    splitter: Splitter, groups: Groups, seconds: Sequence[float], parts: int
) -> Iterator[tuple[int, int, int]]:
    """Yield a giving group, a taking group and tokens: what evens them out, or parts of all."""
    unit, count = splitter.unit, len(groups)
    fastest_first = sorted(range(count), key=lambda g: (seconds[g], g))
    givers = fastest_first[::-1] if count <= FEW else fastest_first[-1:]
    for giver in givers:
        tokens = groups[giver].num_tokens
        for taker in [g for g in fastest_first if g != giver][:FEW]:
            gap = (seconds[giver] - seconds[taker]) / 2 / max(seconds[giver], 1e-300)
            shares = [int(gap * tokens), *(tokens * part // parts for part in range(1, parts))]
            steps = {share // unit * unit for share in shares} | {tokens, 2 * unit, unit}
            for step in sorted((s for s in steps if 0 < s <= tokens), reverse=True):
                yield giver, taker, step


def _resplit(splitter: Splitter, groups: Groups, g: int, more: int) -> list[Group]:
    return splits(splitter, groups[g], groups[g].num_tokens + more, alone=len(groups) == 1)


def splits(splitter: Splitter, group: Group, num_tokens: int, alone: bool) -> list[Group]:
    """Return the group with `num_tokens` in the splits that are offered, stage III's first."""
    offered = [splitter.split(group.ranks, num_tokens, alone)[0]]
    if 1 < len(group.ranks) <= FEW:
        for count in range(len(group.ranks), 0, -1):
            for working in combinations(group.ranks, count):
                offered += _even(splitter, group, working, num_tokens)
                for quick in (True, False):
                    offered.append(
                        splitter.split_on(group.ranks, working, num_tokens, alone, quick)
                    )
                offered.append(replace(offered[0], heads=offered[-1].heads))
    return list(dict.fromkeys(offered))


def _even(splitter: Splitter, group: Group, working: Ranks, num_tokens: int) -> list[Group]:
    """Return the group with equal tokens and heads on some ranks, what is over first or last."""
    at_work = [int(rank in working) for rank in group.ranks]
    units, rest = divmod(num_tokens, splitter.unit)
    tokens = [splitter.unit * count for count in apportion(units, at_work[::-1])][::-1]
    tokens[at_work.index(1)] += rest
    last = Group(group.ranks, tuple(tokens), tuple(apportion(sum(group.heads), at_work)))
    tokens = [splitter.unit * count for count in apportion(units, at_work)]
    tokens[at_work.index(1)] += rest
    return [replace(last, tokens=tuple(tokens)), last]


def _crossed(splitter: Splitter, group: Group) -> Iterator[Group]:
    """Yield a small group with tokens on some of its ranks and heads on others."""
    some = [
        working
        for count in range(1, len(group.ranks) + 1)
        for working in combinations(group.ranks, count)
    ]
    even = {working: _even(splitter, group, working, group.num_tokens)[0] for working in some}
    for for_tokens, for_heads in product(some, some):
        yield replace(even[for_tokens], heads=even[for_heads].heads)


def inside_moved(splitter: Splitter, groups: Groups, g: int) -> Iterator[Groups]:
    """Yield groups with group g in other splits, or one head or block from one rank to another."""
    group = groups[g]
    for changed in splits(splitter, group, group.num_tokens, alone=len(groups) == 1):
        yield (*groups[:g], changed, *groups[g + 1 :])
    for changed in _shifted_ranks(splitter, group):
        yield (*groups[:g], changed, *groups[g + 1 :])


def _shifted_ranks(splitter: Splitter, group: Group) -> Iterator[Group]:
    kinds = [splitter.kind[rank] for rank in group.ranks]
    held = list(zip(kinds, group.tokens, group.heads, strict=True))
    unlike = [r for r in range(len(held)) if held[r] not in held[:r] or len(held) <= FEW]
    pairs = [(giver, taker) for giver in unlike for taker in unlike if giver != taker]
    for giver, taker in pairs:
        if group.heads[giver]:
            yield replace(group, heads=shifted(group.heads, giver, taker, 1))
    for giver, taker in pairs:
        if group.tokens[giver] >= splitter.unit:
            yield replace(group, tokens=shifted(group.tokens, giver, taker, splitter.unit))


def shifted(counts: Sequence[int], giver: int, taker: int, step: int) -> tuple[int, ...]:
    """Return counts after `step` went from one place to another."""
    changed = list(counts)
    changed[giver] -= step
    changed[taker] += step
    return tuple(changed)
