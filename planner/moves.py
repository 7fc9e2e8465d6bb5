"""Local moves on a finished layout, each judged by the evaluator.

Only a replica's slowest group decides, so every move starts there: tokens to other groups, heads
and tokens between its ranks, another place in the nesting order, ranks swapped with other groups or
moved from and to them. The first move that helps is made, until none does or the evaluations are
used up. A move helps if the step gets shorter, or stays and the groups together get faster:
several groups may be the slowest at once. Replicas that are alike move alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations

from hexiseq_triton.planner.balance import Dealing, balanced, key
from hexiseq_triton.planner.cost import Cost
from hexiseq_triton.planner.neighbours import FEW, inside_moved, tokens_moved, two_moves
from hexiseq_triton.planner.problem import Group, Replica
from hexiseq_triton.planner.stages import Frame, Splitter

_ROUNDS = 2
"""Evaluations for tokens over changed groups."""
_NO_GAIN = 1e-9
"""Relative gains up to this are none."""


def improved(splitter: Splitter, cost: Cost, most: int, fixed: bool = False) -> Cost:
    """Return a layout at least as good.

    Args:
        splitter: the problem.
        cost: of the layout to start from.
        most: evaluations at most, all replicas together.
        fixed: leave ranks where they are; only tokens and heads move.
    """
    layout = cost.layout
    replicas = list(layout.replicas)
    kinds: dict[object, list[int]] = {}
    for d, replica in enumerate(replicas):
        kinds.setdefault(_make(splitter, replica), []).append(d)
    last = splitter.evaluations + most
    moving = _Moving(splitter, Frame.of(layout), last, fixed)
    costs = {d[0]: moving.judge(replicas[d[0]]) for d in kinds.values()}
    alike = {members[0]: members for members in kinds.values()}
    while splitter.evaluations < last:
        slowest = max(costs, key=lambda d: (key(costs[d]), -d))
        better = moving.better(costs[slowest])
        if better is None:
            break
        costs[slowest] = better
    for first, members in alike.items():
        changed = costs[first].layout.replicas[0]
        for d in members:
            replicas[d] = _on_other_ranks(changed, layout.replicas[first], layout.replicas[d])
    found = splitter.judged(moving.frame, replicas)
    return min(cost, found, key=key)


def _make(splitter: Splitter, replica: Replica) -> object:
    groups = tuple((splitter.make(g.ranks), g.tokens, g.heads) for g in replica.groups)
    return groups, replica.sequences


def _on_other_ranks(replica: Replica, old: Replica, new: Replica) -> Replica:
    """Return `replica` with each rank of `old` replaced by the one in its place in `new`."""
    pairs = zip(old.groups, new.groups, strict=True)
    place = {r: s for a, b in pairs for r, s in zip(a.ranks, b.ranks, strict=True)}
    return moved(replica, place)


def moved(replica: Replica, place: dict[int, int]) -> Replica:
    """Return the replica on other ranks."""
    return replace(
        replica,
        groups=tuple(replace(g, ranks=tuple(place[r] for r in g.ranks)) for g in replica.groups),
    )


class _Moving:
    """Finds moves of one replica until `last` evaluations have been made."""

    def __init__(self, splitter: Splitter, frame: Frame, last: int, fixed: bool) -> None:
        self.splitter, self.frame, self.last, self.fixed = splitter, frame, last, fixed

    def judge(self, replica: Replica) -> Cost:
        return self.splitter.judged(self.frame, [replica])

    def better(self, cost: Cost) -> Cost | None:
        """Return the first neighbour that is better; None if there is none."""
        for neighbour in self._neighbours(cost):
            if _gains(neighbour, cost):
                return neighbour
            if self.splitter.evaluations >= self.last:
                break
        return None

    def _neighbours(self, cost: Cost) -> Iterator[Cost]:
        groups = cost.layout.replicas[0].groups
        seconds = cost.group_seconds.tolist()
        slowest = max(range(len(groups)), key=lambda g: (seconds[g], -g))
        for changed in tokens_moved(self.splitter, groups, seconds):
            yield self.judge(replace(cost.layout.replicas[0], groups=changed))
        for g in [slowest] if len(groups) > FEW else range(len(groups)):
            for changed in inside_moved(self.splitter, groups, g):
                yield self.judge(replace(cost.layout.replicas[0], groups=changed))
        if self.fixed:
            for changed in two_moves(self.splitter, groups, seconds):
                yield self.judge(replace(cost.layout.replicas[0], groups=changed))
            return
        sequences = cost.layout.replicas[0].sequences
        for reordered in _reordered(groups, slowest):
            start = [group.num_tokens for group in reordered]
            order = [group.ranks for group in reordered]
            yield self._rebalanced(order, sequences, start, in_order=True)
        for grouping in self._ranks_moved(groups, seconds, slowest):
            yield self._rebalanced(grouping, sequences, None, in_order=False)

    def _rebalanced(
        self,
        grouping: Sequence[tuple[int, ...]],
        sequences: int,
        start: Sequence[float] | None,
        in_order: bool,
    ) -> Cost:
        dealing = Dealing(
            self.frame.name, grouping, sequences, _ROUNDS, start=start, in_order=in_order
        )
        return balanced(self.splitter, self.frame, dealing)

    def _ranks_moved(
        self, groups: Sequence[Group], seconds: Sequence[float], slowest: int
    ) -> Iterator[list[tuple[int, ...]]]:
        """Yield groupings after a rank came to the slowest group, left it, or was swapped.

        Also with the slowest group joined to another, and with one of its ranks on its own.
        """
        kind, heads = self.splitter.kind, self.splitter.problem.model.heads
        ranks = [group.ranks for group in groups]
        here = _one_a_kind(ranks[slowest], kind)
        others = sorted(
            (g for g in range(len(groups)) if g != slowest), key=lambda g: (seconds[g], g)
        )
        for other in others[:FEW]:
            there = _one_a_kind(ranks[other], kind)
            for r in there:
                if len(ranks[slowest]) < heads:
                    yield _regrouped(ranks, slowest, other, (), (r,))
            for r in here:
                if len(ranks[other]) < heads:
                    yield _regrouped(ranks, slowest, other, (r,), ())
                for s in there:
                    if kind[r] != kind[s]:
                        yield _regrouped(ranks, slowest, other, (r,), (s,))
            if len(ranks[slowest]) + len(ranks[other]) <= heads:
                yield _regrouped(ranks, slowest, other, ranks[slowest], ())
        if len(ranks[slowest]) > 1:
            for r in here:
                rest = tuple(s for s in ranks[slowest] if s != r)
                yield [*ranks[:slowest], rest, (r,), *ranks[slowest + 1 :]]
                yield [*ranks[:slowest], (r,), rest, *ranks[slowest + 1 :]]


def _gains(new: Cost, old: Cost) -> bool:
    if key(new) < (old.fits is False, key(old)[1] * (1 - _NO_GAIN)):
        return True
    same = new.fits == old.fits and key(new)[1] <= key(old)[1] * (1 + 1e-15)
    return bool(same and new.group_seconds.sum() < old.group_seconds.sum() * (1 - _NO_GAIN))


def _reordered(groups: Sequence[Group], slowest: int) -> Iterator[Sequence[Group]]:
    """Yield groups with the slowest one place outwards, inwards, outermost and innermost.

    Few groups are put in every order.
    """
    if len(groups) <= FEW:
        yield from list(permutations(groups))[1:]
        return
    for place in sorted(
        {slowest - 1, slowest + 1, 0, len(groups) - 1} - {slowest, -1, len(groups)}
    ):
        changed = [group for g, group in enumerate(groups) if g != slowest]
        changed.insert(place, groups[slowest])
        yield changed


def _one_a_kind(ranks: Sequence[int], kind: Sequence[int]) -> list[int]:
    return list({kind[r]: r for r in reversed(ranks)}.values())[::-1]


def _regrouped(
    ranks: Sequence[tuple[int, ...]],
    a: int,
    b: int,
    to_b: tuple[int, ...],
    to_a: tuple[int, ...],
) -> list[tuple[int, ...]]:
    """Return the grouping after some ranks changed sides; an empty group is gone."""
    changed = list(ranks)
    changed[a] = tuple(sorted({*ranks[a], *to_a} - set(to_b)))
    changed[b] = tuple(sorted({*ranks[b], *to_b} - set(to_a)))
    return [group for group in changed if group]
