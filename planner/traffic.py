"""Bytes through every rank's ports: the all-to-all in a group, the KV exchange between groups.

Each rank has two ports, one inside its node and one across nodes, each with an egress and an
ingress. A transfer phase lasts as long as its fullest port. All arrays run over the ranks of a
layout in group order, one row per (group, rank).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hexiseq_triton.planner.heads import kv_heads_of
from hexiseq_triton.planner.problem import Layout, Problem
from hexiseq_triton.planner.rates import Floats, Ints

GRADIENT_BYTES = 4
"""Partial dK and dV travel in float32."""


@dataclass(frozen=True)
class Rows:
    """A layout as arrays over its ranks, in group order."""

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

    @classmethod
    def of(cls, problem: Problem, layout: Layout) -> Rows:
        q_per_kv = problem.model.heads // problem.model.kv_heads
        kv_ranges = []
        for group in layout.groups:
            start = 0
            for count in group.heads:
                kv_ranges.append(kv_heads_of((start, start + count), q_per_kv))
                start += count
        sizes = np.array([len(group.ranks) for group in layout.groups])
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        rank = np.array([r for group in layout.groups for r in group.ranks])
        tokens = np.array([t for group in layout.groups for t in group.tokens], dtype=float)
        return cls(
            rank=rank,
            group=np.repeat(np.arange(len(sizes)), sizes),
            tokens=tokens,
            q_heads=np.array([h for group in layout.groups for h in group.heads], dtype=float),
            kv_ranges=np.array(kv_ranges),
            node=problem.rates.node[rank],
            group_starts=starts,
            group_sizes=sizes,
            group_tokens=np.add.reduceat(tokens, starts),
        )

    @property
    def kv_heads(self) -> Floats:
        return (self.kv_ranges[:, 1] - self.kv_ranges[:, 0]).astype(float)

    def most(self, values: Floats) -> Floats:
        """Return the largest value of each group."""
        result: Floats = np.maximum.reduceat(values, self.group_starts)
        return result

    def by_group_and_node(self, values: Floats) -> Floats:
        """Return sums of `values` as [groups, nodes]."""
        sums = np.zeros((len(self.group_starts), int(self.node.max()) + 1))
        np.add.at(sums, (self.group, self.node), values)
        return sums


@dataclass(frozen=True)
class Ports:
    """Bytes each rank sends and receives, inside its node and across nodes."""

    out_in_node: Floats
    out_across: Floats
    in_in_node: Floats
    in_across: Floats

    def seconds(self, in_node: Floats, across: Floats) -> Floats:
        """Return how long each rank's fullest port takes, at the ranks' bytes/s."""
        inside = np.maximum(self.out_in_node, self.in_in_node) / in_node
        result: Floats = np.maximum(inside, np.maximum(self.out_across, self.in_across) / across)
        return result

    def with_returns(self, share: float) -> Ports:
        """Add the way back: each transfer is answered by `share` times its bytes."""
        return Ports(
            self.out_in_node + share * self.in_in_node,
            self.out_across + share * self.in_across,
            self.in_in_node + share * self.out_in_node,
            self.in_across + share * self.out_across,
        )


def all_to_all(problem: Problem, rows: Rows, heads: Floats) -> Ports:
    """Return the traffic of one ragged all-to-all from tokens to heads; reversed, it is the same.

    Rank d sends its tokens' part of e's heads to e: `tokens[d] * heads[e]` head rows.
    """
    head_bytes = 2 * problem.model.head_dim
    token_sums, head_sums = rows.by_group_and_node(rows.tokens), rows.by_group_and_node(heads)
    here = (rows.group, rows.node)

    def others(values: Floats, sums: Floats) -> tuple[Floats, Floats]:
        return sums[here] - values, sums.sum(axis=1)[rows.group] - sums[here]

    heads_near, heads_far = others(heads, head_sums)
    tokens_near, tokens_far = others(rows.tokens, token_sums)
    return Ports(
        rows.tokens * heads_near * head_bytes,
        rows.tokens * heads_far * head_bytes,
        heads * tokens_near * head_bytes,
        heads * tokens_far * head_bytes,
    )


def fetched_tokens(problem: Problem, layout: Layout, rows: Rows) -> Floats:
    """Return [i, j]: tokens of group j whose KV group i fetches; an upper bound if packed.

    Causal and balanced: an inner group's tokens all lie before an outer group's last, and of an
    outer group's two mirrored pieces only the front one lies before an inner group's last.
    """
    count = len(rows.group_starts)
    inner, outer = np.triu(np.ones((count, count)), 1), np.tril(np.ones((count, count)), -1)
    if not problem.workload.causal:
        seen = inner + outer
    elif layout.arrangement == "balanced":
        seen = inner + outer / 2
    else:
        seen = outer
    result: Floats = seen * rows.group_tokens[None, :]
    return result


def kv_exchange(problem: Problem, rows: Rows, fetched: Floats) -> Ports:
    """Return the traffic of one exchange of keys and values between groups.

    Head intervals between neighbouring cuts travel one by one. Where several ranks of the source
    group hold an interval, they share its requests.
    """
    token_bytes = 2 * 2 * problem.model.head_dim
    near_in, far_in, near_out, far_out = (np.zeros(len(rows.rank)) for _ in range(4))
    edges = np.unique(rows.kv_ranges)
    for start, stop in pairwise(edges):
        holds = (rows.kv_ranges[:, 0] <= start) & (stop <= rows.kv_ranges[:, 1])
        holders = rows.by_group_and_node(holds.astype(float))
        per_group = holders.sum(axis=1)
        here = (rows.group[holds], rows.node[holds])
        width = float(stop - start) * token_bytes

        received = (fetched @ (holders / per_group[:, None]))[here]
        near_in[holds] += width * received
        far_in[holds] += width * (fetched.sum(axis=1)[here[0]] - received)

        asked = (fetched.T @ holders)[here] / per_group[here[0]]
        all_asked = (fetched.T @ per_group)[here[0]] / per_group[here[0]]
        near_out[holds] += width * asked
        far_out[holds] += width * (all_asked - asked)
    return Ports(near_out, far_out, near_in, far_in)
