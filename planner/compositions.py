"""Stage II: which groups, and how many of each, by a parametric integer program.

A composition says how many ranks of which kinds form a group: k ranks of each of m nodes, of one
kind or of several. In a trial time T a group of composition c finishes v_c(T) tokens. Then

    maximise    sum_c v_c(T) x_c                                  [percent of the replica's tokens]
    subject to  sum_c ranks[c, q] x_c <= ranks[q]   for all kinds q         ranks_of_kind_q
                x_c integer, >= 0

T is feasible if the groups chosen, counted anew, finish 100 %, and is not if the solver's bound
stays below; T moves between the two. Compositions of several kinds enter only where their bound
asks for it: no group of ranks is faster than all its ranks in one fluid (`bound`), so with the
prices of the relaxed program over one-kind compositions, one that cannot lift the relaxed optimum
to 100 % is dropped. Solver work is limited by nodes, never by time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations

import numpy as np

from hexiseq_triton.planner.estimate import Estimator, group_tokens
from hexiseq_triton.planner.groupings import Grouping, Nodes
from hexiseq_triton.planner.rates import Floats
from hexiseq_triton.planner.speeds import ATTENTION_BACKWARD, ATTENTION_FORWARD, HEADS
from hexiseq_triton.planner.stages import Ranks

_TRIALS = 3
_CLOSE = 0.005
"""The bracket around T is not narrowed below this share of it."""
_MOST_NODES = 200
"""Branch-and-bound nodes of one solve."""
_MOST_COLUMNS, _VALUED = 150, 3
"""Columns of one program; for each that has room, so many of several kinds are valued, those with
the best bounds."""
_WHOLE = 100.0
_TOLERANCE = 1e-6
"""What a solver's bound may be short of the truth."""

Part = tuple[int, int, int]
"""A kind, ranks of each node, nodes."""


@dataclass(frozen=True)
class _Stock:
    """The ranks of a replica by kind: for each, its ranks node by node."""

    by_kind: dict[int, list[list[int]]]

    @classmethod
    def of(cls, nodes: Nodes, kind: Sequence[int]) -> _Stock:
        by_kind: dict[int, list[list[int]]] = defaultdict(list)
        for node in nodes:
            mine: dict[int, list[int]] = defaultdict(list)
            for rank in node:
                mine[kind[rank]].append(rank)
            for number, ranks in mine.items():
                by_kind[number].append(ranks)
        return cls({number: by_kind[number] for number in sorted(by_kind)})

    def parts(self, number: int, most: int) -> Iterator[Part]:
        """Yield how a group of at most `most` ranks can take ranks of one kind."""
        nodes = self.by_kind[number]
        for k in range(1, min(most, max(len(ranks) for ranks in nodes)) + 1):
            roomy = sum(len(ranks) >= k for ranks in nodes)
            yield from ((number, k, m) for m in range(1, min(roomy, most // k) + 1))

    def some(self, parts: Sequence[Part]) -> Ranks:
        """Return ranks of which a group of these parts could consist."""
        return tuple(
            rank
            for number, k, m in parts
            for ranks in [r for r in self.by_kind[number] if len(r) >= k][:m]
            for rank in ranks[:k]
        )


def composed(estimator: Estimator, nodes: Nodes, num_tokens: int, seconds: float) -> list[Grouping]:
    """Return the groupings that the program chooses for each T that is feasible, the last T's last.

    Args:
        estimator: the problem, and rates of groups.
        nodes: the ranks of a replica, node by node.
        num_tokens: of the replica, in one pass.
        seconds: of a layer, that a known grouping takes about.
    """
    stock = _Stock.of(nodes, estimator.splitter.kind)
    program = _Program(estimator, stock, num_tokens, seconds)
    low, high = program.fluid_seconds, seconds
    chosen: list[Grouping] = []
    trial = high
    for _ in range(_TRIALS):
        counts, done, bound = program.solve(trial)
        if done >= num_tokens:
            high = trial
            chosen.append(_placed(stock, nodes, counts))
        elif bound < num_tokens:
            low = trial
        trial = min(max(trial * num_tokens / max(done, 1.0), low), (low + high) / 2)
        if high <= low * (1 + _CLOSE):
            break
    return list(dict.fromkeys(chosen))


class _Program:
    """The program above for one replica; columns are chosen once, at the first T."""

    def __init__(
        self, estimator: Estimator, stock: _Stock, num_tokens: int, seconds: float
    ) -> None:
        self.estimator, self.stock, self.num_tokens = estimator, stock, num_tokens
        self.kinds = list(stock.by_kind)
        self.available = [sum(map(len, stock.by_kind[number])) for number in self.kinds]
        splitter = estimator.splitter
        self.node_speed: dict[int, float] = defaultdict(float)
        for ranks in chain.from_iterable(stock.by_kind.values()):
            self.node_speed[splitter.node[ranks[0]]] += sum(splitter.alone[r] for r in ranks)
        first = [stock.by_kind[number][0][0] for number in self.kinds]
        self.phases = 1 / splitter.speeds.by_rank[first, : ATTENTION_BACKWARD + 1]
        self.heads = int(splitter.speeds.shared[HEADS])
        self.fluid_seconds = num_tokens / self._fluid(np.array([self.available]))[0]
        self.columns = self._columns(seconds)

    def _columns(self, seconds: float) -> list[tuple[Part, ...]]:
        alone: list[tuple[Part, ...]] = [
            (part,) for number in self.kinds for part in self.stock.parts(number, self.heads)
        ]
        mixed = list(self._mixed())
        if not mixed:
            return alone
        bound, prices = self._relaxed(alone, seconds)
        counts = np.array([self._counts(column) for column in mixed])
        gain = seconds * self._fluid(counts) * (_WHOLE / self.num_tokens) - counts @ prices
        most = _MOST_COLUMNS - len(alone)
        by_gain = np.argsort(-gain, kind="stable")[: _VALUED * max(0, most)]
        hopeful = by_gain[bound + gain[by_gain] >= _WHOLE]
        kept = [mixed[i] for i in hopeful]
        gain = self._values(kept, seconds) - counts[hopeful] @ prices
        order = [i for i in np.argsort(-gain, kind="stable") if bound + gain[i] >= _WHOLE]
        return alone + [kept[i] for i in order[: max(0, most)]]

    def _mixed(self) -> Iterator[tuple[Part, ...]]:
        """Yield compositions of two kinds, and of more that all give the same."""
        for pair in combinations(self.kinds, 2):
            for first in self.stock.parts(pair[0], self.heads - 1):
                for second in self.stock.parts(pair[1], self.heads - first[1] * first[2]):
                    yield first, second
        for count in range(3, len(self.kinds) + 1):
            for several in combinations(self.kinds, count):
                for _, k, m in self.stock.parts(several[0], self.heads // count):
                    column = tuple((number, k, m) for number in several)
                    if all(
                        sum(len(ranks) >= k for ranks in self.stock.by_kind[number]) >= m
                        for number in several
                    ):
                        yield column

    def _counts(self, column: Sequence[Part]) -> list[int]:
        ranks = {number: k * m for number, k, m in column}
        return [ranks.get(number, 0) for number in self.kinds]

    def _fluid(self, counts: Floats) -> Floats:
        """Return tokens a second that no group of so many ranks of each kind exceeds."""
        seconds = 1 / (counts @ self.phases)
        attention = self.heads * seconds[:, ATTENTION_FORWARD:].sum(axis=1)
        result: Floats = 1 / (seconds[:, :ATTENTION_FORWARD].sum(axis=1) + attention)
        return result

    def _values(self, columns: Sequence[Sequence[Part]], seconds: float) -> Floats:
        """Return percent of the tokens that a group of each composition finishes in `seconds`."""
        total = float(self.num_tokens)
        tokens = []
        for column in columns:
            ranks = self.stock.some(column)
            rates = self.estimator.rates(ranks, self.num_tokens // 4)
            fetch = self.estimator.fetch_alone(rates, self._near(ranks))
            tokens.append(group_tokens(seconds, total, rates[:3].copy(), fetch))
        return np.array(tokens) * (_WHOLE / self.num_tokens)

    def _near(self, ranks: Ranks) -> float:
        """Return about which share of the other tokens lies on a group's nodes: that of speed."""
        splitter = self.estimator.splitter
        own = sum(splitter.alone[rank] for rank in ranks)
        there = sum(self.node_speed[node] for node in {splitter.node[rank] for rank in ranks})
        return (there - own) / max(sum(self.node_speed.values()) - own, 1e-300)

    def _relaxed(self, columns: list[tuple[Part, ...]], seconds: float) -> tuple[float, Floats]:
        """Return the relaxed optimum over one-kind columns, and each kind's price of a rank.

        With one kind a column the relaxed program falls apart: each kind takes its best column.
        """
        values = self._values(columns, seconds)
        prices = np.zeros(len(self.kinds))
        for ((number, k, m),), value in zip(columns, values, strict=True):
            q = self.kinds.index(number)
            prices[q] = max(prices[q], value / (k * m))
        return float(prices @ self.available), prices

    def solve(self, seconds: float) -> tuple[dict[tuple[Part, ...], int], float, float]:
        """Return how many groups of each composition, their tokens, and the solver's bound."""
        from mip import CBC, INTEGER, MAXIMIZE, LinExpr, Model  # slow to import

        values = self._values(self.columns, seconds)
        model = Model(sense=MAXIMIZE, solver_name=CBC)
        model.verbose = 0
        model.threads = 1
        model.cuts = 0  # they take longer here than the branching they save
        counts = [model.add_var(var_type=INTEGER, obj=float(value)) for value in values]
        ranks = np.array([self._counts(column) for column in self.columns])
        for q, available in enumerate(self.available):
            using = np.flatnonzero(ranks[:, q]).tolist()
            used = LinExpr([counts[c] for c in using], ranks[using, q].tolist())
            model.add_constr(used <= available, f"ranks_of_kind_{q}")
        model.optimize(max_nodes=_MOST_NODES)

        chosen = [round(count.x) if model.num_solutions else 0 for count in counts]
        done = float(np.dot(values, chosen)) / _WHOLE * self.num_tokens
        bound = float(model.objective_bound) / _WHOLE * self.num_tokens * (1 + _TOLERANCE)
        return {c: n for c, n in zip(self.columns, chosen, strict=True) if n}, done, bound


def _placed(stock: _Stock, nodes: Nodes, chosen: dict[tuple[Part, ...], int]) -> Grouping:
    """Return ranks for every group, widest first; a rank left over joins a group of its node."""
    free = {number: [list(ranks) for ranks in by] for number, by in stock.by_kind.items()}
    order = {rank: at for at, rank in enumerate(r for node in nodes for r in node)}
    groups: list[list[int]] = []
    widest_first = sorted(
        chosen.items(), key=lambda item: (-max(m for _, _, m in item[0]), item[0])
    )
    for column, _ in widest_first:
        for _ in range(chosen[column]):
            group = [r for part in column for r in _taken(free[part[0]], part[1], part[2])]
            groups.append(sorted(group, key=order.__getitem__))
    at = {rank: n for n, node in enumerate(nodes) for rank in node}
    for rank in sorted(r for by_node in free.values() for ranks in by_node for r in ranks):
        near = [g for g in groups if any(at[r] == at[rank] for r in g)]
        taker = min(near or groups, key=lambda g: (len(g), g))
        taker.append(rank)
        taker.sort(key=order.__getitem__)
    return tuple(sorted((tuple(group) for group in groups), key=lambda group: order[group[0]]))


def _taken(nodes: list[list[int]], k: int, m: int) -> list[int]:
    """Take k ranks of each of m nodes, the fullest ones; where they have fewer, of more nodes."""
    taken: list[int] = []
    while len(taken) < k * m:
        fullest = max(nodes, key=len)
        count = min(k, k * m - len(taken), len(fullest))
        taken += fullest[:count]
        del fullest[:count]
    return taken
