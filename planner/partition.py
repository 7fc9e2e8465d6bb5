"""Deal the tokens of one batch to the groups and ranks of a replica, in the plan's proportions.

Causal, one document: group g owns a piece of L_g/2 tokens from the front and the mirror piece from
the back, all groups nested in the same order. A token at position p costs p + 1 and its mirror
N - p, so for even L_g the work of g is exactly L_g (N + 1) / 2, for any widths. The one token over
of each odd group comes from the middle, where every token costs about (N + 1) / 2.

Packed documents: work no longer grows linearly along the stream. Documents are cut into chunks, 16
or more to the smallest group, and the chunk with most work per token goes to the group whose open
work per open token is highest, until every group has its tokens exactly. Documents shorter than a
chunk stay in one group where the counts allow it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from fractions import Fraction

from hexiseq_triton.planner.plans import GroupPlan, Plan
from hexiseq_triton.segments import (
    CAUSAL,
    FULL,
    Mask,
    Segment,
    cut,
    merge,
    pairs,
    whole_documents,
)

_CHUNKS_PER_GROUP = 16  # of the smallest group: its work is then met to about 1%
_MOST_CHUNKS = 2048
_LEAST_CHUNK = 16


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """Split `total` in proportion to `weights`, in integers, by largest remainder.

    Ties go to the first. All weights 0 counts as all equal; a weight of 0 otherwise gets 0.
    """
    whole = sum(weights)
    if not whole:
        weights, whole = [1] * len(weights), len(weights)
    shares = [total * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: -(total * weights[i] % whole))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares


def deal(plan: Plan, replica: int, document_lengths: Sequence[int]) -> list[list[list[Segment]]]:
    """Return the segments of every rank, as [group][rank in group], for one batch of a replica.

    Args:
        plan: the plan; its token counts are the proportions when the batch has another total.
        replica: index of the replica.
        document_lengths: tokens of each document of the replica's packed stream.
    """
    groups = plan.replicas[replica].groups
    total = sum(document_lengths)
    group_tokens = apportion(total, [group.tokens for group in groups])
    mask = CAUSAL if plan.causal else FULL
    if plan.exchange.arrangement == "contiguous":
        runs = cut(whole_documents(document_lengths), group_tokens)
    else:
        runs = balanced(document_lengths, group_tokens, mask)
    return [
        cut(run, _rank_tokens(group, tokens))
        for group, tokens, run in zip(groups, group_tokens, runs, strict=True)
    ]


def _rank_tokens(group: GroupPlan, tokens: int) -> list[int]:
    return apportion(tokens, [share.tokens for share in group.ranks])


def balanced(
    document_lengths: Sequence[int], group_tokens: Sequence[int], mask: Mask
) -> list[list[Segment]]:
    """Return each group's segments so that work per token is alike; counts are met exactly."""
    documents = whole_documents(document_lengths)
    if not documents:
        return [[] for _ in group_tokens]
    if mask == CAUSAL and len(documents) == 1:
        return mirrored(documents[0], group_tokens)
    if len(documents) == 1:
        return cut(documents, group_tokens)
    return _dealt_in_chunks(documents, group_tokens, mask)


def mirrored(document: Segment, group_tokens: Sequence[int]) -> list[list[Segment]]:
    """Return each group's front and back piece of one causal document, outermost group first."""
    front, back = 0, document.num_tokens
    middle = (document.num_tokens - sum(tokens % 2 for tokens in group_tokens)) // 2
    pieces = []
    for tokens in group_tokens:
        half = tokens // 2
        parts = [Segment(document.document, front, front + half)]
        if tokens % 2:
            parts.append(Segment(document.document, middle, middle + 1))
            middle += 1
        parts.append(Segment(document.document, back - half, back))
        pieces.append(merge(parts))
        front, back = front + half, back - half
    return pieces


def _dealt_in_chunks(
    documents: Sequence[Segment], group_tokens: Sequence[int], mask: Mask
) -> list[list[Segment]]:
    total = sum(group_tokens)
    smallest = min(tokens for tokens in group_tokens if tokens)
    size = max(_LEAST_CHUNK, smallest // _CHUNKS_PER_GROUP, total // _MOST_CHUNKS)
    open_tokens = list(group_tokens)
    work_per_token = Fraction(sum(_work(d, d.stop, mask) for d in documents), total)
    open_work = [work_per_token * tokens for tokens in group_tokens]

    # (work per token, document, start, chunk, document length), heaviest first
    heap = []
    for document in documents:
        for chunk in _chunks(document, size):
            heap.append(_entry(chunk, document.stop, mask))
    heapq.heapify(heap)

    dealt: list[list[Segment]] = [[] for _ in group_tokens]
    while heap:
        _, _, _, chunk, length = heapq.heappop(heap)
        g = max(
            (g for g, tokens in enumerate(open_tokens) if tokens),
            key=lambda g: (open_work[g] / open_tokens[g], -g),
        )
        taken = chunk._replace(stop=min(chunk.stop, chunk.start + open_tokens[g]))
        dealt[g].append(taken)
        open_tokens[g] -= taken.num_tokens
        open_work[g] -= _work(taken, length, mask)
        if taken.stop < chunk.stop:
            heapq.heappush(heap, _entry(chunk._replace(start=taken.stop), length, mask))
    return [merge(sorted(segments)) for segments in dealt]


def _chunks(document: Segment, size: int) -> list[Segment]:
    """Cut a document into equal chunks of at most `size` tokens."""
    count = -(-document.num_tokens // size)
    return [run[0] for run in cut([document], apportion(document.num_tokens, [1] * count))]


def _work(segment: Segment, length: int, mask: Mask) -> int:
    """Return the (query, key) pairs of a segment against its whole document."""
    return pairs(segment.start, segment.stop, 0, length, mask)


def _entry(chunk: Segment, length: int, mask: Mask) -> tuple[Fraction, int, int, Segment, int]:
    density = Fraction(_work(chunk, length, mask), chunk.num_tokens)
    return (-density, chunk.document, chunk.start, chunk, length)
