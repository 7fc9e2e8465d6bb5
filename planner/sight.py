"""What the queries of each group see: the work of attention, and whose KV they have to fetch.

Balanced and causal, one document: group g has L_g (N + 1) / 2 pairs for each head. An inner group's
tokens all lie before an outer group's last one, and of an outer group's two mirrored pieces only
the front one lies before an inner group's last: whole and half of its KV travel.

A stream of several documents is dealt in chunks, so that each group's work per token is the
average. Then nearly every group sees nearly all tokens, and all are counted as fetched. Where the
workload names its documents they are dealt as the runtime does, and counted exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hexiseq_triton.planner.fetches import Counted, Fetches, Nested
from hexiseq_triton.planner.partition import balanced
from hexiseq_triton.planner.problem import Arrangement, Layout, Problem
from hexiseq_triton.planner.rates import Floats, Ints
from hexiseq_triton.planner.rows import Rows
from hexiseq_triton.planner.workload import Workload
from hexiseq_triton.segments import CAUSAL, FULL, cut, whole_documents


@dataclass(frozen=True)
class Sight:
    """(query, key) pairs of each group for one head, and what the groups fetch of each other."""

    pairs: Floats
    fetches: Fetches


def sight_of(problem: Problem, layout: Layout, rows: Rows, *, fluid: bool = False) -> Sight:
    """Return what the groups of a layout see; `fluid` takes named documents as evenly dealt."""
    if problem.workload.documents is not None and not fluid:
        return _exact(problem, layout)
    sequences = np.array([replica.sequences for replica in layout.replicas])
    return fluid_sight(problem, rows, sequences, layout.arrangement)


def fluid_sight(problem: Problem, rows: Rows, sequences: Ints, arrangement: Arrangement) -> Sight:
    """Return what groups see, counted as the module says; fetches are a bound from above if packed.

    Args:
        problem: whose workload.
        rows: the groups.
        sequences: of each replica in one pass.
        arrangement: how tokens are dealt to groups.
    """
    workload = problem.workload
    packed = (sequences > 1) | (len(workload.document_lengths) > 1)
    to_inner, to_outer = 1.0, 0.5
    if arrangement == "contiguous":
        to_inner, to_outer, packed = 0.0, 1.0, np.zeros_like(packed)
    if not workload.causal:
        to_inner, to_outer = 1.0, 1.0
    fetches = Nested(
        rows.group_tokens,
        np.where(packed, 1.0, to_inner)[rows.replica],
        np.where(packed, 1.0, to_outer)[rows.replica],
        rows.replica,
    )
    if arrangement == "balanced":
        return Sight(rows.group_tokens * workload.pairs_per_token, fetches)
    outer, _ = fetches.around(rows.group_tokens)
    return Sight(_pairs_of_runs(workload, outer, outer + rows.group_tokens), fetches)


def _pairs_of_runs(workload: Workload, start: Floats, stop: Floats) -> Floats:
    """Return the pairs of runs [start, stop) of a stream of whole sequences."""
    lengths = np.array(workload.document_lengths, dtype=float)
    ends = np.cumsum(lengths)
    whole = lengths * (lengths + 1) / 2 if workload.causal else lengths**2

    def before(at: Floats) -> Floats:
        turns, inside = np.divmod(at, workload.seq_len)
        document = np.searchsorted(ends, inside, side="right")
        document = np.minimum(document, len(lengths) - 1)
        done = inside - (ends - lengths)[document]
        part = done * (done + 1) / 2 if workload.causal else done * lengths[document]
        result: Floats = turns * whole.sum() + (np.cumsum(whole) - whole)[document] + part
        return result

    return before(stop) - before(start)


def _exact(problem: Problem, layout: Layout) -> Sight:
    """Return what the groups see of the documents, dealt as the runtime deals them."""
    workload = problem.workload
    parts = [
        _dealt(
            workload.document_lengths * replica.sequences,
            tuple(group.num_tokens for group in replica.groups),
            workload.causal,
            layout.arrangement == "balanced",
        )
        for replica in layout.replicas
    ]
    count = sum(len(pairs) for pairs, _ in parts)
    fetched = np.zeros((count, count))
    start = 0
    for pairs, seen in parts:
        members = slice(start, start + len(pairs))
        fetched[members, members] = seen
        start += len(pairs)
    return Sight(np.concatenate([pairs for pairs, _ in parts]), Counted(fetched))


@lru_cache(maxsize=256)
def _dealt(
    lengths: tuple[int, ...], group_tokens: tuple[int, ...], causal: bool, is_balanced: bool
) -> tuple[Floats, Floats]:
    """Return the pairs of each group of one replica, and the rows each fetches of each other."""
    mask = CAUSAL if causal else FULL
    documents = whole_documents(lengths)
    runs = balanced(lengths, group_tokens, mask) if is_balanced else cut(documents, group_tokens)
    segments = np.array([(g, *s) for g, run in enumerate(runs) for s in run])
    group, document, start, stop = segments.T
    count, length = len(group_tokens), np.array(lengths)[document]
    if causal:
        work = (stop * (stop + 1) - start * (start + 1)) / 2
        reach = np.zeros((len(lengths), count), dtype=np.int64)
        np.maximum.at(reach, (document, group), stop)
    else:
        work = (stop - start) * length
        reach = np.zeros((len(lengths), count), dtype=np.int64)
        reach[document, group] = length
    seen = np.clip(reach[document] - start[:, None], 0, (stop - start)[:, None])
    rows = np.zeros((count, count))
    np.add.at(rows, group, seen)
    np.fill_diagonal(rows, 0)
    return np.bincount(group, work, minlength=count).astype(float), rows.T.copy()
