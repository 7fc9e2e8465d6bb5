"""A layout as arrays over its working ranks, one row a rank, group by group."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from hexiseq_triton.planner.problem import Layout, Problem
from hexiseq_triton.planner.rates import Floats, Ints


@dataclass(frozen=True)
class Rows:
    """What each working rank holds. `group_*` and `replica` are arrays over groups."""

    rank: Ints
    group: Ints
    tokens: Floats
    q_heads: Floats
    kv_ranges: Ints
    """[rows, 2], KV heads [start, stop)."""
    node: Ints
    group_starts: Ints
    group_sizes: Ints
    group_tokens: Floats
    replica: Ints

    @classmethod
    def of(cls, problem: Problem, layout: Layout) -> Rows:
        groups = layout.groups
        rank, tokens, heads = (
            np.fromiter(chain.from_iterable(getattr(group, name) for group in groups), np.int64)
            for name in ("ranks", "tokens", "heads")
        )
        replica = np.repeat(
            np.arange(len(layout.replicas)), [len(r.groups) for r in layout.replicas]
        )
        sizes = np.array([len(group.ranks) for group in groups])
        return cls.from_arrays(problem, rank, tokens, heads, sizes, replica)

    @classmethod
    def from_arrays(
        cls, problem: Problem, rank: Ints, tokens: Ints, heads: Ints, sizes: Ints, replica: Ints
    ) -> Rows:
        """Return the rows of ranks, tokens and query heads; `sizes` and `replica` are of groups."""
        starts = np.cumsum(sizes) - sizes
        shares = tokens.astype(float)
        return cls(
            rank=rank,
            group=np.repeat(np.arange(len(sizes)), sizes),
            tokens=shares,
            q_heads=heads.astype(float),
            kv_ranges=_kv_ranges(heads, problem.model.heads, problem.model.kv_heads),
            node=problem.rates.node[rank],
            group_starts=starts,
            group_sizes=sizes,
            group_tokens=np.add.reduceat(shares, starts),
            replica=replica,
        )

    def of_replica(self, index: int) -> tuple[Rows, slice, slice]:
        """Return the rows of one replica, and which rows and groups of these they are."""
        first, last = np.searchsorted(self.replica, [index, index + 1]).tolist()
        start = int(self.group_starts[first])
        groups, rows = slice(first, last), slice(start, start + self.group_sizes[first:last].sum())
        part = Rows(
            rank=self.rank[rows],
            group=self.group[rows] - first,
            tokens=self.tokens[rows],
            q_heads=self.q_heads[rows],
            kv_ranges=self.kv_ranges[rows],
            node=self.node[rows],
            group_starts=self.group_starts[groups] - start,
            group_sizes=self.group_sizes[groups],
            group_tokens=self.group_tokens[groups],
            replica=np.zeros(last - first, dtype=np.int64),
        )
        return part, rows, groups

    @cached_property
    def kv_heads(self) -> Floats:
        return (self.kv_ranges[:, 1] - self.kv_ranges[:, 0]).astype(float)

    @cached_property
    def groups_in_replica(self) -> Ints:
        """How many groups the replica of each group has."""
        result: Ints = np.bincount(self.replica)[self.replica]
        return result

    @cached_property
    def exchanges(self) -> NDArray[np.bool_]:
        """Whether each row's replica has more than one group."""
        result: NDArray[np.bool_] = self.groups_in_replica[self.group] > 1
        return result

    @cached_property
    def share_of_replica(self) -> Floats:
        """Each group's share of its replica's tokens."""
        totals = sums_by(self.replica, self.group_tokens)[self.replica]
        result: Floats = self.group_tokens / totals
        return result

    @cached_property
    def spans_nodes(self) -> NDArray[np.bool_]:
        """Whether each group has ranks in several nodes."""
        first = np.minimum.reduceat(self.node, self.group_starts)
        result: NDArray[np.bool_] = first != np.maximum.reduceat(self.node, self.group_starts)
        return result

    @cached_property
    def share_kv(self) -> NDArray[np.bool_]:
        """Whether each group holds some KV head on several ranks."""
        held = np.add.reduceat(self.kv_heads, self.group_starts)
        kv_heads = np.maximum.reduceat(self.kv_ranges[:, 1], self.group_starts)
        result: NDArray[np.bool_] = held > kv_heads
        return result

    @cached_property
    def replica_starts(self) -> Ints:
        """The first row of each replica."""
        first_groups = np.flatnonzero(np.diff(self.replica, prepend=-1))
        result: Ints = self.group_starts[first_groups]
        return result

    def most(self, values: Floats) -> Floats:
        """Return the largest value of each group."""
        result: Floats = np.maximum.reduceat(values, self.group_starts)
        return result

    def in_node(self, values: Floats) -> Floats:
        """Return, for each row, the sum of `values` over its group's ranks in its node."""
        return sums_by(self._group_and_node, values)[self._group_and_node]

    @cached_property
    def _group_and_node(self) -> Ints:
        """A number for each row's group and node, counted without gaps."""
        both = self.group * (int(self.node.max()) + 1) + self.node
        result: Ints = np.unique(both, return_inverse=True)[1]
        return result

    def in_group(self, values: Floats) -> Floats:
        """Return, for each row, the sum of `values` over its group."""
        result: Floats = np.add.reduceat(values, self.group_starts)[self.group]
        return result


def sums_by(index: Ints, values: Floats, count: int = 0) -> Floats:
    """Return the sum of `values` for each index from 0, at least `count` of them."""
    return np.asarray(np.bincount(index, values, minlength=count), dtype=np.float64)


def _kv_ranges(heads: Ints, num_heads: int, num_kv_heads: int) -> Ints:
    """Return the KV heads that each rank's query heads read; `heads` fills group after group."""
    q_per_kv = num_heads // num_kv_heads
    after = np.cumsum(heads)
    start = (after - heads) % num_heads
    stop = np.where(heads > 0, -(-(start + heads) // q_per_kv), start // q_per_kv)
    result: Ints = np.stack([start // q_per_kv, stop], axis=1)
    return result
