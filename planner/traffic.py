"""Bytes through every rank's ports: the all-to-alls in a group, the KV exchange between groups.

A rank sends and receives inside its node, by NVLink or PCIe, and across nodes, by its NIC. Where
the node has no NVLink, both go through the rank's PCIe port. Directions don't share. A phase of
transfers lasts as long as its fullest port. Arrays run over the rows of a layout (`Rows`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hexiseq_triton.planner.fetches import Fetches
from hexiseq_triton.planner.problem import Problem
from hexiseq_triton.planner.rates import Floats, Ints, Rates
from hexiseq_triton.planner.rows import Rows, sums_by

BF16, FLOAT32 = 2, 4
"""Bytes of a number: activations, and partial sums of gradients."""


@dataclass(frozen=True)
class Ports:
    """Bytes each row's rank sends and receives, inside its node and across nodes."""

    out_in_node: Floats
    out_across: Floats
    in_in_node: Floats
    in_across: Floats

    def seconds(self, rates: Rates, rank: Ints, across: Floats) -> Floats:
        """Return how long each row's fullest port takes; `across` is bytes/s of each rank."""
        near = np.maximum(self.out_in_node, self.in_in_node)
        far = np.maximum(self.out_across, self.in_across)
        both = np.maximum(self.out_in_node + self.out_across, self.in_in_node + self.in_across)
        inside = np.where(rates.shares_port[rank], both, near)
        result: Floats = np.maximum(inside / rates.in_node[rank], far / across[rank])
        return result

    def nic_seconds(self, rates: Rates, rank: Ints) -> Floats:
        """Return how long each row's NIC is at work, in its busier direction."""
        result: Floats = np.maximum(self.out_across, self.in_across) / rates.across[rank]
        return result

    def with_returns(self, share: float) -> Ports:
        """Add the way back: each transfer is answered by `share` times its bytes."""
        return Ports(
            self.out_in_node + share * self.in_in_node,
            self.out_across + share * self.in_across,
            self.in_in_node + share * self.out_in_node,
            self.in_across + share * self.out_across,
        )


def all_to_all(rows: Rows, width: Floats) -> Ports:
    """Return the traffic of one ragged all-to-all from tokens to heads; the way back is alike.

    Args:
        rows: the layout.
        width: bytes that each rank's heads take for one token.
    """
    width_near, tokens_near = rows.in_node(width), rows.in_node(rows.tokens)
    width_all, tokens_all = rows.in_group(width), rows.in_group(rows.tokens)
    return Ports(
        rows.tokens * (width_near - width),
        rows.tokens * (width_all - width_near),
        width * (tokens_near - rows.tokens),
        width * (tokens_all - tokens_near),
    )


def kv_exchange(problem: Problem, rows: Rows, fetches: Fetches) -> Ports:
    """Return the traffic of one exchange of keys and values between groups.

    Heads travel in intervals between neighbouring cuts of a replica. Where several ranks of the
    source group hold an interval, they share its requests.

    Args:
        problem: whose model and nodes.
        rows: the layout.
        fetches: tokens that the groups fetch of each other.
    """
    held = _Held.of(rows)
    group = rows.group[held.row]
    holders = held.holders[group, held.interval]
    take, give = held.pairs_in_node(rows)
    served = fetches.between(group[take], group[give]) / holders[give]
    near_in = sums_by(take, served, len(held.row))
    near_out = sums_by(give, served, len(held.row))
    all_in = fetches.received()[group]
    all_out = fetches.asked(held.holders)[group, held.interval] / holders
    width = 2 * BF16 * problem.model.head_dim * held.width

    def by_row(tokens: Floats) -> Floats:
        return sums_by(held.row, width * tokens, len(rows.rank))

    return Ports(
        by_row(near_out), by_row(all_out - near_out), by_row(near_in), by_row(all_in - near_in)
    )


def intervals_held(rows: Rows) -> Floats:
    """Return how many intervals between neighbouring cuts of its replica each row holds."""
    start, stop = _intervals(rows)
    result: Floats = (stop - start).astype(float)
    return result


def _intervals(rows: Rows) -> tuple[Ints, Ints]:
    """Return the intervals [start, stop) each row holds, numbered from 0 in each replica."""
    replica = rows.replica[rows.group]
    holds = rows.kv_heads > 0
    cuts = np.zeros((int(replica[-1]) + 1, int(rows.kv_ranges.max()) + 1), dtype=np.int64)
    cuts[replica[holds, None], rows.kv_ranges[holds]] = 1
    before = np.cumsum(cuts, axis=1) - 1
    start, stop = before[replica[:, None], rows.kv_ranges].T
    return np.where(holds, start, 0), np.where(holds, stop, 0)


@dataclass(frozen=True)
class _Held:
    """Which rows hold which intervals: one entry for each row and interval."""

    row: Ints
    interval: Ints
    width: Ints
    """KV heads of each entry's interval."""
    holders: Floats
    """[groups, intervals], ranks of a group that hold an interval."""

    @classmethod
    def of(cls, rows: Rows) -> _Held:
        first, last = _intervals(rows)
        counts = last - first
        row = np.repeat(np.arange(len(counts)), counts)
        interval = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts - first, counts)
        num_intervals = int(last.max())
        # where each interval of each replica begins and ends
        replica = rows.replica[rows.group]
        edges = np.zeros((int(replica[-1]) + 1, num_intervals + 1), dtype=np.int64)
        holds = counts > 0
        for end, head in zip((first, last), rows.kv_ranges.T, strict=True):
            edges[replica[holds], end[holds]] = head[holds]
        at = replica[row]
        width = edges[at, interval + 1] - edges[at, interval]
        size = len(rows.group_starts) * num_intervals
        holders = np.bincount(rows.group[row] * num_intervals + interval, minlength=size)
        return cls(row, interval, width, holders.astype(float).reshape(-1, num_intervals))

    def pairs_in_node(self, rows: Rows) -> tuple[Ints, Ints]:
        """Return all pairs of entries of one interval, node and replica.

        Nothing is fetched inside a group, so pairs of one group move nothing.
        """
        replica = rows.replica[rows.group[self.row]]
        bucket = replica * (int(rows.node.max()) + 1) + rows.node[self.row]
        bucket = bucket * self.holders.shape[1] + self.interval
        order = np.argsort(bucket, kind="stable")
        starts = np.flatnonzero(np.diff(bucket[order], prepend=-1))
        sizes = np.diff(starts, append=len(order))
        per_entry = np.repeat(sizes, sizes)
        take = np.repeat(np.arange(len(order)), per_entry)
        within = np.arange(len(take)) - np.repeat(np.cumsum(per_entry) - per_entry, per_entry)
        return order[take], order[np.repeat(starts, sizes)[take] + within]
