"""From cu_seqlens to segments: which rows of q, k and v belong to which document.

Queries and keys of a document end together (flash-attention's bottom-right alignment): of the two,
the shorter one begins at the position by which it is shorter, the longer one at 0.

    len_q = 2, len_k = 5:  q at 3 4, k at 0 1 2 3 4
    len_q = 5, len_k = 2:  q at 0 1 2 3 4, k at 3 4, so causal queries 0 to 2 see nothing
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

from hexiseq_triton.errors import InputError
from hexiseq_triton.segments import Segment

Offsets = tuple[int, ...]
Segments = tuple[Segment, ...]


def check_offsets(name: str, offsets: Offsets, num_tokens: int, max_seqlen: int | None) -> None:
    """Raise an InputError unless `offsets` cut `num_tokens` rows into documents.

    Args:
        name: "q" or "k", for the message.
        offsets: the numbers in cu_seqlens.
        num_tokens: rows of the tensor.
        max_seqlen: no document may be longer; None checks nothing.
    """
    if offsets[0] != 0 or offsets[-1] != num_tokens:
        raise InputError(
            f"cu_seqlens_{name} goes from {offsets[0]} to {offsets[-1]}; {name} has {num_tokens} "
            f"tokens, so it must go from 0 to {num_tokens}"
        )
    lengths = [stop - start for start, stop in pairwise(offsets)]
    for i, length in enumerate(lengths):
        if length < 0:
            raise InputError(
                f"cu_seqlens_{name} falls from {offsets[i]} to {offsets[i + 1]} at entry {i + 1}; "
                "it must never fall (equal entries are an empty document)"
            )
    longest = max(lengths, default=0)
    if max_seqlen is not None and max_seqlen < longest:
        raise InputError(
            f"max_seqlen_{name} is {max_seqlen}; the longest document in cu_seqlens_{name} has "
            f"{longest} tokens: use {longest} or more, or None"
        )


@lru_cache(maxsize=64)
def aligned_segments(q_offsets: Offsets, k_offsets: Offsets) -> tuple[Segments, Segments]:
    """Return the segments of queries and keys; position 0 is each document's first token.

    Raises:
        InputError: if the numbers of documents differ.
    """
    if len(q_offsets) != len(k_offsets):
        raise InputError(
            f"cu_seqlens_q has {len(q_offsets)} entries, cu_seqlens_k {len(k_offsets)}; "
            "both need one more than there are documents"
        )
    q_segments, k_segments = [], []
    both = zip(pairwise(q_offsets), pairwise(k_offsets), strict=True)
    for document, ((q_start, q_stop), (k_start, k_stop)) in enumerate(both):
        num_q, num_k = q_stop - q_start, k_stop - k_start
        end = max(num_q, num_k)
        if num_q:
            q_segments.append(Segment(document, end - num_q, end))
        if num_k:
            k_segments.append(Segment(document, end - num_k, end))
    return tuple(q_segments), tuple(k_segments)
