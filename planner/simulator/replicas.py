"""One replica as the exchange sees it: who holds which heads, and whose keys each group works on.

Heads travel in intervals between neighbouring cuts of the replica, one entry for each row and
interval. Where several ranks of a group hold an interval, they take turns in serving it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hexiseq_triton.planner.cost import Cost
from hexiseq_triton.planner.rates import Floats, Ints
from hexiseq_triton.planner.sight import sight_of
from hexiseq_triton.planner.traffic import BF16


@dataclass(frozen=True)
class ReplicaView:
    """Rows and groups of one replica, numbered from 0.

    Attributes:
        rows: where its rows stand in the layout's.
        rank: of each row.
        group: of each row.
        position: of each row in its group.
        tokens: of each group.
        share: [groups, groups], how much of a group's attention reads which group's keys.
        fetched: [groups, groups], tokens of the second whose keys the first fetches.
        kv_ranges: [rows, 2], KV heads [start, stop) of each row.
        bytes_per_token: of one KV head's keys and values.
    """

    rows: Ints
    rank: Ints
    group: Ints
    position: Ints
    tokens: Floats
    share: Floats
    fetched: Floats
    kv_ranges: Ints
    bytes_per_token: float

    @property
    def num_groups(self) -> int:
        return len(self.tokens)

    @cached_property
    def _cuts(self) -> Ints:
        held = self.kv_ranges[self.kv_ranges[:, 0] < self.kv_ranges[:, 1]]
        return np.unique(held)

    @cached_property
    def _intervals(self) -> tuple[Ints, Ints]:
        """The intervals [first, last) of each row."""
        first, last = np.searchsorted(self._cuts, self.kv_ranges).T
        return first, np.where(self.kv_ranges[:, 0] < self.kv_ranges[:, 1], last, first)

    @cached_property
    def entry_row(self) -> Ints:
        """The row of each entry; those of a row stand together, by interval."""
        first, last = self._intervals
        return np.repeat(np.arange(len(first)), last - first)

    @cached_property
    def entry_starts(self) -> Ints:
        """Where each row's entries start, with one more for the end."""
        first, last = self._intervals
        return np.concatenate([[0], np.cumsum(last - first)])

    @cached_property
    def entry_interval(self) -> Ints:
        within = np.arange(len(self.entry_row)) - self.entry_starts[self.entry_row]
        result: Ints = self._intervals[0][self.entry_row] + within
        return result

    @cached_property
    def entry_heads(self) -> Floats:
        """KV heads of each entry."""
        result: Floats = np.diff(self._cuts)[self.entry_interval].astype(float)
        return result

    @cached_property
    def servers(self) -> Ints:
        """[groups, entries], the entry of each group that serves each entry."""
        entries, groups, cuts = len(self.entry_row), self.num_groups, len(self._cuts)
        slot = self.group[self.entry_row] * cuts + self.entry_interval
        order = np.argsort(slot, kind="stable")
        starts = np.searchsorted(slot[order], np.arange(groups * cuts + 1))
        wanted = np.arange(groups)[:, None] * cuts + self.entry_interval
        holders = starts[wanted + 1] - starts[wanted]
        turn = self.position[self.entry_row] % holders
        assert entries == len(order)
        result: Ints = order[starts[wanted] + turn]
        return result


def replica_views(cost: Cost) -> list[ReplicaView]:
    """Return the replicas of more than one group."""
    rows, problem = cost.rows, cost.problem
    views = []
    fetches = sight_of(problem, cost.layout, rows).fetches
    half_own = cost.layout.arrangement == "contiguous" and problem.workload.causal
    for index in range(len(cost.layout.replicas)):
        groups = np.flatnonzero(rows.replica == index)
        if len(groups) == 1:
            continue
        at = np.flatnonzero(rows.replica[rows.group] == index)
        fetched = np.asarray(fetches.between(groups[:, None], groups[None, :]))
        tokens = rows.group_tokens[groups]
        views.append(
            ReplicaView(
                rows=at,
                rank=rows.rank[at],
                group=rows.group[at] - groups[0],
                position=at - rows.group_starts[rows.group[at]],
                tokens=tokens,
                share=_shares(tokens, fetched, half_own=half_own),
                fetched=fetched,
                kv_ranges=rows.kv_ranges[at],
                bytes_per_token=2.0 * BF16 * problem.model.head_dim,
            )
        )
    return views


def _shares(tokens: Floats, fetched: Floats, *, half_own: bool) -> Floats:
    """Return how much of each group's attention reads the keys of which group.

    In balanced layouts work goes by the owner's tokens: of an outer group's keys half are seen by
    all queries, of an inner one's all by half. In contiguous runs a causal group sees all of the
    tokens before it, and half of its own; without a mask, all of all.
    """
    own = np.eye(len(tokens), dtype=bool)
    seen = np.where(own | (fetched > 0), tokens[None, :], 0.0)
    seen = np.where(own & half_own, seen / 2, seen)
    total = seen.sum(axis=1, keepdims=True)
    result: Floats = np.where(total > 0, seen / np.where(total > 0, total, 1.0), own)
    return result
