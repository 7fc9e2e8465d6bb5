"""The search: replicas, then their groups, then tokens and heads, each judged by the evaluator.

    allotments   how many replicas, of how many sequences and of which ranks       (`replicas`)
    groupings    which ranks of a replica form head-parallel groups                (`groupings`)
    composed     a grouping that a parametric integer program chooses              (`compositions`)
    balanced     tokens over the groups                                            (`balance`)
    split_group  tokens and heads over the ranks of a group                        (`inner`)
    improved     local moves                                                       (`moves`)

Allotments come by rising bound. Of each pool of ranks, the groupings with the best estimates are
looked at; pools of alike ranks are solved once. The best allotments get a closer look: more rounds,
the integer program, both arrangements, moves. All limits count evaluations, never time, so that
equal problems get equal plans; a time limit, if one is set, is the exception.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import permutations

from hexiseq_triton.planner.balance import Dealing, balanced_apart, key
from hexiseq_triton.planner.capacity import roomiest
from hexiseq_triton.planner.compositions import composed
from hexiseq_triton.planner.cost import Cost
from hexiseq_triton.planner.estimate import Estimator
from hexiseq_triton.planner.groupings import FEW_RANKS, Grouping, groupings
from hexiseq_triton.planner.moves import improved, moved
from hexiseq_triton.planner.neighbours import FEW
from hexiseq_triton.planner.problem import Arrangement, Problem
from hexiseq_triton.planner.replicas import Allotment, Pool, allotments
from hexiseq_triton.planner.stages import Frame, Splitter

_EVALUATIONS, _MORE_EVALUATIONS = 400, 800
"""After so many, no further allotment is looked at; more for few ranks, where all are tried."""
_IN_VAIN = 3
"""After so many looks that bring nothing, the search goes on to the best ones; on small clusters,
where looks are cheap, after more: `_MANY_RANKS` over the ranks."""
_MANY_RANKS = 256
_ROUNDS, _MORE_ROUNDS = 2, 6
"""Evaluations for a first look at a grouping, and for the best ones."""
_MOVES, _MORE_MOVES = 40, 200
"""Evaluations for the local moves of one layout; more of few ranks."""
_TRUST = 0.87
"""An estimate times this is hardly above the evaluator's time."""
_EXPOSED = 1.1
"""A step this much above its bound shows communication."""
_LOOKED_AT, _MOST_LOOKED_AT, _ALL_LOOKED_AT = 8, 16, 50
"""Groupings of a pool that the evaluator looks at, best estimates first; more if none fits in
memory, or of few ranks."""
_KEPT = 2
"""Groupings of a pool, and allotments, that get a closer look. Moves go on from the best, and of
few ranks from all of them."""


@dataclass(frozen=True)
class Options:
    """Stages that can be left out, to see what each is worth."""

    compositions: bool = True
    replicas: bool = True
    across_nodes: bool = True
    moves: bool = True


@dataclass(frozen=True, order=True)
class _Candidate:
    """A grouping with the estimate of its layer, and tokens to begin with."""

    short_of_memory: bool
    seconds: float
    grouping: Grouping
    name: str
    tokens: tuple[float, ...]


@dataclass
class Search:
    """One run of the search; `cut_short` tells whether the time limit ended it."""

    problem: Problem
    options: Options = field(default_factory=Options)
    time_limit_seconds: float | None = None
    cut_short: bool = False

    def __post_init__(self) -> None:
        self.splitter = Splitter(self.problem)
        self.estimator = Estimator(self.splitter)
        self._alike: dict[object, Pool] = {}
        self._estimates: dict[tuple[Pool, Arrangement], list[_Candidate]] = {}
        self._looks: dict[tuple[Pool, Frame], list[tuple[Cost, _Candidate]]] = {}
        self._few = self.problem.cluster.world_size <= FEW_RANKS
        limit = self.time_limit_seconds
        self._end = None if limit is None else time.monotonic() + limit

    def best(self, start: Cost | None = None) -> Cost:
        """Return the best layout's cost; if none fits in memory, the one closest to fitting.

        Args:
            start: a layout known already, which may be moved on from; allotments that cannot be
                faster are not looked at.
        """
        looked: list[tuple[Cost, Allotment]] = []
        limit = start.step_seconds if start is not None else float("inf")
        most, kept = (_MORE_EVALUATIONS, 2 * _KEPT) if self._few else (_EVALUATIONS, _KEPT)
        patience = max(_IN_VAIN, _MANY_RANKS // self.problem.cluster.world_size)
        in_vain = 0
        for allotment in self._allotments():
            used_up = self.splitter.evaluations > most or in_vain >= patience
            if looked and (used_up or self._out_of_time()):
                break
            if looked and (allotment.seconds >= limit or self._hardly_below(allotment) >= limit):
                continue
            cost = self._first(allotment)
            gains = not looked or key(cost) < min(key(known) for known, _ in looked)
            in_vain = 0 if gains else in_vain + 1
            looked.append((cost, allotment))
            if cost.fits:
                limit = min(limit, cost.step_seconds)
        looked.sort(key=lambda entry: key(entry[0]))
        closer = [
            cost if self._out_of_time() else self._closer(cost, allotment)
            for cost, allotment in looked[:kept]
        ]
        if start is not None:
            closer.append(start)
        closer.sort(key=key)
        if self.options.moves and not self._out_of_time():
            moves = _MORE_MOVES if self._few else _MOVES
            closer = [improved(self.splitter, cost, moves) for cost in closer[: kept // 2]]
        best = min(closer, key=key)
        return best if best.fits else min(best, roomiest(self.splitter), key=key)

    def _allotments(self) -> list[Allotment]:
        found = allotments(self.problem, self.splitter)
        return found if self.options.replicas else [a for a in found if len(a.pools) == 1]

    def _out_of_time(self) -> bool:
        if self._end is not None and time.monotonic() > self._end:
            self.cut_short = True
        return self.cut_short

    def _first(self, allotment: Allotment) -> Cost:
        """Return the cost of the allotment's best layout at first look."""
        cost = self._layout(allotment, "balanced", self._first_look)
        if self._tries_contiguous(allotment, cost):
            cost = min(cost, self._layout(allotment, "contiguous", self._first_look), key=key)
        return cost

    def _tries_contiguous(self, allotment: Allotment, cost: Cost) -> bool:
        """Return whether communication shows, of which contiguous runs need less."""
        exposed = cost.step_seconds > _EXPOSED * allotment.seconds
        return self.problem.workload.causal and exposed

    def _closer(self, cost: Cost, allotment: Allotment) -> Cost:
        """Return the cost of the allotment's best layout, after a closer look at each pool."""
        found = [cost, self._layout(allotment, "balanced", self._closer_look)]
        if self._tries_contiguous(allotment, cost):
            found.append(self._layout(allotment, "contiguous", self._closer_look))
        return min(found, key=key)

    def _layout(
        self,
        allotment: Allotment,
        arrangement: Arrangement,
        look: Callable[[Pool, Frame], Cost],
    ) -> Cost:
        """Return the cost of an allotment with the best layout of each pool; alike pools alike."""
        frame = Frame("", allotment.accumulation, arrangement)
        solved: dict[Pool, Cost] = {}
        replicas, names = [], []
        for pool in allotment.pools:
            first = self._first_alike(pool)
            if first not in solved:
                solved[first] = look(first, frame)
            cost, place = solved[first], dict(zip(first.ranks, pool.ranks, strict=True))
            replicas.append(moved(cost.layout.replicas[0], place))
            names.append(cost.layout.name)
        named = Frame("; ".join(sorted(set(names))), allotment.accumulation, arrangement)
        return self.splitter.judged(named, replicas)

    def _first_alike(self, pool: Pool) -> Pool:
        return self._alike.setdefault(pool.make(self.splitter.kind), pool)

    # ---------------------------------------------------------------- one pool

    def _hardly_below(self, allotment: Allotment) -> float:
        """Return step seconds that the allotment will hardly fall below."""
        layer = max(
            self._estimated(self._first_alike(pool), "balanced")[0].seconds
            for pool in allotment.pools
        )
        return allotment.accumulation * self.problem.model.layers * layer * _TRUST

    def _estimated(self, pool: Pool, arrangement: Arrangement) -> list[_Candidate]:
        """Return a pool's groupings with estimates of their layer, best first."""
        if (pool, arrangement) not in self._estimates:
            tokens = pool.sequences * self.problem.workload.seq_len
            room = self.splitter.room_for_tokens(pool.ranks, alone=True)
            self._estimates[pool, arrangement] = sorted(
                _Candidate(self._short(groups, tokens, room), seconds, groups, name, shares)
                for groups, name in self._groupings(pool, arrangement)
                for seconds, shares in [self.estimator.estimated(groups, tokens, arrangement)]
            )
        return self._estimates[pool, arrangement]

    def _groupings(self, pool: Pool, arrangement: Arrangement) -> Iterable[tuple[Grouping, str]]:
        """Yield a pool's groupings; for contiguous runs the best balanced ones in several orders.

        Few ranks are tried in every order, and the best groupings if of few groups.
        """
        if arrangement == "balanced":
            splitter, heads = self.splitter, self.problem.model.heads
            for groups, name in groupings(pool.nodes, splitter.alone, splitter.kind, heads).items():
                if self.options.across_nodes or not self._crosses_nodes(groups):
                    yield groups, name
            return
        known = self._estimated(pool, "balanced")
        for place, candidate in enumerate(known if self._few else known[:_LOOKED_AT]):
            groups = candidate.grouping
            every_order = self._few or (place < 2 * _KEPT and len(groups) <= FEW)
            for order in permutations(groups) if every_order else (groups, groups[::-1]):
                yield order, candidate.name

    def _short(self, groups: Grouping, num_tokens: int, room: float) -> bool:
        """Return whether the groups' memory does not suffice for the tokens, however dealt.

        `room` is for how many tokens it would if they received nothing of each other.
        """
        alone, splitter = len(groups) == 1, self.splitter
        if room - len(groups) * splitter.room_for_buffers >= num_tokens:
            return False
        return sum(splitter.room_for_tokens(ranks, alone) for ranks in groups) < num_tokens

    def _crosses_nodes(self, groups: Grouping) -> bool:
        node = self.splitter.node
        return any(len({node[rank] for rank in group}) > 1 for group in groups)

    def _looked_at(self, pool: Pool, frame: Frame) -> list[tuple[Cost, _Candidate]]:
        """Return the candidates of a pool with the best estimates, best first."""
        if (pool, frame) not in self._looks:
            candidates = self._estimated(pool, frame.arrangement)
            most = candidates[0].seconds / _TRUST**2
            hopeful = [
                candidate
                for place, candidate in enumerate(candidates)
                if place < _ALL_LOOKED_AT and (place == 0 or not candidate.short_of_memory)
            ]
            first = [each for each in hopeful[:_LOOKED_AT] if each.seconds <= most]
            first = hopeful if self._few else first
            found = self._looks_of(pool, frame, first)
            if not any(cost.fits for cost, _ in found):
                found += self._looks_of(pool, frame, hopeful[len(first) : _MOST_LOOKED_AT])
            found.sort(key=lambda entry: key(entry[0]))
            self._looks[pool, frame] = found
        return self._looks[pool, frame]

    def _first_look(self, pool: Pool, frame: Frame) -> Cost:
        return self._looked_at(pool, frame)[0][0]

    def _closer_look(self, pool: Pool, frame: Frame) -> Cost:
        """Return the best layout of a pool after more rounds, compositions included."""
        looks = self._looked_at(pool, frame)
        candidates = [candidate for _, candidate in looks[: 3 * _KEPT if self._few else _KEPT]]
        composes = self.options.compositions and frame.arrangement == "balanced"
        if composes and not self._few:
            tokens = pool.sequences * self.problem.workload.seq_len
            seconds = float(looks[0][0].group_seconds.max())
            known = [candidate.grouping for _, candidate in looks]
            for grouping in composed(self.estimator, pool.nodes, tokens, seconds):
                if grouping not in known:
                    estimate = self.estimator.estimated(grouping, tokens, frame.arrangement)
                    candidates.append(
                        _Candidate(False, estimate[0], grouping, "composition", estimate[1])
                    )
        costs = self._balanced(pool, frame, candidates, _MORE_ROUNDS, quick=False)
        if self._few and self.options.moves:
            costs = [improved(self.splitter, cost, _MOVES) for cost in costs]
        return min(costs, key=key)

    def _looks_of(
        self, pool: Pool, frame: Frame, candidates: list[_Candidate]
    ) -> list[tuple[Cost, _Candidate]]:
        costs = self._balanced(pool, frame, candidates, _ROUNDS, quick=True)
        return list(zip(costs, candidates, strict=True))

    def _balanced(
        self, pool: Pool, frame: Frame, candidates: list[_Candidate], rounds: int, quick: bool
    ) -> list[Cost]:
        dealings = [
            Dealing(each.name, each.grouping, pool.sequences, rounds, quick, each.tokens)
            for each in candidates
        ]
        return balanced_apart(self.splitter, frame, dealings)
