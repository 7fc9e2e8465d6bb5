"""Launches of attention on keys of one head interval, and how those on own keys are dealt out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch

from hexiseq_triton.kernels import HeadMap
from hexiseq_triton.kernels.options import Segments
from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.planner.heads import HeadRange
from hexiseq_triton.rounds import PlacedRound
from hexiseq_triton.segments import num_tokens


@dataclass(frozen=True)
class Launch:
    """Keys and values of one head interval, and the local query heads that read them.

    `kv_heads` are those of the interval that `kv` holds.
    """

    interval: HeadRange
    kv: torch.Tensor
    segments: Segments
    q_heads: slice[int, int, None]
    kv_heads: slice[int, int, None]
    heads: HeadMap

    def of_heads(self, start: int, stop: int, q_per_kv: int) -> Launch:
        """Return the launch of KV heads [start, stop) of those here."""
        begin = self.heads.q_head_start
        end = begin + self.q_heads.stop - self.q_heads.start
        first = max(begin, (self.interval[0] + start) * q_per_kv)  # a query head of the model
        last = min(end, (self.interval[0] + stop) * q_per_kv)
        at = self.q_heads.start - begin
        return replace(
            self,
            kv=self.kv[:, :, start:stop],
            q_heads=slice(at + first, at + last),
            kv_heads=slice(start, stop),
            heads=self.heads._replace(q_head_start=first),
        )


class OwnTurns(NamedTuple):
    """When the backward of own keys runs: before all rounds, during each, and after them."""

    first: list[Launch]
    during: list[list[Launch]]
    last: list[Launch]


def own_turns(
    rounds: Sequence[PlacedRound], layout: BatchLayout, launches: Sequence[Launch]
) -> OwnTurns:
    """Deal the KV heads of own keys out over the rounds of the backward; see `own_shares`."""
    num_heads = sum(launch.kv_heads.stop for launch in launches)
    edges = [0, *own_shares(rounds, layout, num_heads), num_heads]
    first, *during, last = (
        _of_heads(launches, start, stop, layout.plan.q_per_kv) for start, stop in pairwise(edges)
    )
    return OwnTurns(first, during, last)


def own_shares(rounds: Sequence[PlacedRound], layout: BatchLayout, num_heads: int) -> list[int]:
    """Return how many KV heads of own keys are done before the rounds, and after each of them.

    Rounds in which nothing arrives are those in which others pass rows that this rank owns. They
    get their share of its heads, so that it adds what returns when it comes, as the others do. Of
    the rest half comes first and half last.
    """
    empty = sum(1 for round_ in rounds if not round_.arrivals)
    rows = layout.plan.exchange.window * layout.plan.exchange.chunk_tokens
    share = num_heads * rows / max(1, num_tokens(layout.own_group_segments))
    share = min(share, max(0, num_heads - 1) / max(1, empty))
    done = (num_heads - share * empty) / 2
    counts = [round(done + 0.25)]  # of one head, or of three, the larger part comes first
    for round_ in rounds:
        done += 0.0 if round_.arrivals else share
        counts.append(max(counts[-1], round(done + 0.25)))
    return counts


def _of_heads(launches: Sequence[Launch], start: int, stop: int, q_per_kv: int) -> list[Launch]:
    """Return the launches of KV heads [start, stop), counted over all launches."""
    found = []
    for launch in launches:
        count = launch.kv_heads.stop
        first, last = max(0, start), min(count, stop)
        if first < last:
            found.append(launch.of_heads(first, last, q_per_kv))
        start, stop = start - count, stop - count
    return found
