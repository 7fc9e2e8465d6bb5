"""The definition of attention over segments, in blockwise PyTorch.

For one query row the running state is (o, lse): the softmax-weighted mean of the values seen so
far, and the log-sum-exp of their scores s. A further block of keys changes it to

    lse' = log(exp(lse) + sum exp(s))
    o'   = exp(lse - lse') o + sum exp(s - lse') v

so chunks of keys may come in any order, and no separate merge is needed. A row that has seen no
key holds o = 0 and lse = -inf. Backward needs the final lse and delta = rowsum(do * o) alone:

    p = exp(s - lse),  ds = scale p (do v^T - delta),  dv += p^T do,  dq += ds k,  dk += ds^T q

A learnable sink is one more logit of each query head, without a value. It joins once, after the
last chunk, and lse leaves it out; backward is given the log-sum-exp with it (see sink.py).

Layout: q [T, H, D], k and v [T_kv, H_kv, D], o as q, lse and delta [H, T], natural log.
State is float32, float64 for float64 input.
Source: Milakov and Gimelshein, arXiv:1805.02867; Dao, arXiv:2307.08691.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from hexiseq_triton.kernels.options import (
    AttentionOptions,
    HeadMap,
    Segments,
    state_dtype,
    with_rows,
)
from hexiseq_triton.segments import Mask, Segment, pairs

BLOCK = 1024
"""Most query rows and key rows of one block; bounds the memory of the scores."""


class _Block(NamedTuple):
    """A query block and a key block of one document: their rows, and the position of row 0."""

    q_rows: slice
    kv_rows: slice
    q_start: int
    kv_start: int


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    q_segments: Sequence[Segment],
    kv_segments: Segments,
    heads: HeadMap,
    options: AttentionOptions,
) -> None:
    """Let the queries see one more chunk of keys: update (o, lse) in place.

    Args:
        q: queries, [T, H, D]; their positions are `q_segments`.
        k: keys, [T_kv, H_kv, D]; their positions are `kv_segments`.
        v: values, as k.
        o: running output, [T, H, D] in the state dtype; 0 before the first chunk.
        lse: running log-sum-exp, [H, T] in the state dtype; -inf before the first chunk.
        heads: which KV head each query head reads.
        options: mask, scale and softcap.
    """
    kv_head = _kv_heads(q, heads)
    for block in _blocks(q_segments, kv_segments, options.mask):
        values = v[block.kv_rows].to(o.dtype)[:, kv_head]
        scores, _ = _scores(q, k, kv_head, block, options)

        old = lse[:, block.q_rows]
        new = torch.logaddexp(old, scores.logsumexp(dim=-1))
        pivot = new.masked_fill(new == -torch.inf, 0.0)  # keeps -inf - -inf out of exp
        p = torch.exp(scores - pivot[..., None])
        rows = o[block.q_rows]
        rows *= torch.exp(old - pivot).T[..., None]
        rows += torch.einsum("hqk,khd->qhd", p, values)
        lse[:, block.q_rows] = new


def attention_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    q_segments: Sequence[Segment],
    kv_segments: Segments,
    heads: HeadMap,
    options: AttentionOptions,
) -> None:
    """Add one chunk's part of the gradients to dq, dk and dv, in place.

    Args:
        q: queries, [T, H, D].
        k: keys of the chunk, [T_kv, H_kv, D].
        v: values of the chunk, as k.
        do: gradient of the output, as q.
        lse: log-sum-exp over *all* keys of each query, [H, T] in the state dtype.
        delta: row sums of do * o, [H, T] in the state dtype.
        dq: gradient of q, [T, H, D] in the state dtype.
        dk: gradient of k, [T_kv, H_kv, D] in the state dtype.
        dv: gradient of v, as dk.
        q_segments, kv_segments, heads, options: as in `attention_forward`.
    """
    kv_head = _kv_heads(q, heads)
    # a row without keys gets p = exp(-inf) = 0
    seen_lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    for block in _blocks(q_segments, kv_segments, options.mask):
        scores, slope = _scores(q, k, kv_head, block, options)
        p = torch.exp(scores - seen_lse[:, block.q_rows, None])
        do_block = do[block.q_rows].to(p.dtype)
        dp = torch.einsum("qhd,khd->hqk", do_block, v[block.kv_rows].to(p.dtype)[:, kv_head])
        ds = p * (dp - delta[:, block.q_rows, None]) * slope
        keys = k[block.kv_rows].to(p.dtype)[:, kv_head]
        dq[block.q_rows] += torch.einsum("hqk,khd->qhd", ds, keys)
        queries = q[block.q_rows].to(p.dtype)
        dk[block.kv_rows].index_add_(1, kv_head, torch.einsum("hqk,qhd->khd", ds, queries))
        dv[block.kv_rows].index_add_(1, kv_head, torch.einsum("hqk,qhd->khd", p, do_block))


def _kv_heads(q: torch.Tensor, heads: HeadMap) -> torch.Tensor:
    """Return the local KV head of each local query head, [H]."""
    return torch.tensor([heads.kv_head(i) for i in range(q.shape[1])], device=q.device)


def _scores(
    q: torch.Tensor,
    k: torch.Tensor,
    kv_head: torch.Tensor,
    block: _Block,
    options: AttentionOptions,
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Return the masked scores of a block, [H, q, k], and d score / d (q . k)."""
    dtype = state_dtype(q.dtype)
    keys = k[block.kv_rows].to(dtype)[:, kv_head]
    scores = torch.einsum("qhd,khd->hqk", q[block.q_rows].to(dtype), keys)
    scores = scores * options.softmax_scale
    slope: torch.Tensor | float = options.softmax_scale
    if options.softcap > 0.0:
        capped = torch.tanh(scores / options.softcap)
        slope = options.softmax_scale * (1.0 - capped.square())
        scores = options.softcap * capped
    hidden = _hidden(block, options.mask, q.device)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores, slope


def _hidden(block: _Block, mask: Mask, device: torch.device) -> torch.Tensor | None:
    """Return where the mask hides a key, [q, k]; None where it hides nothing."""
    num_q = block.q_rows.stop - block.q_rows.start
    num_kv = block.kv_rows.stop - block.kv_rows.start
    ends = (block.q_start, block.q_start + num_q, block.kv_start, block.kv_start + num_kv)
    if pairs(*ends, mask) == num_q * num_kv:
        return None
    i = torch.arange(ends[0], ends[1], device=device)[:, None]
    j = torch.arange(ends[2], ends[3], device=device)[None, :]
    hidden = torch.zeros(num_q, num_kv, dtype=torch.bool, device=device)
    if mask.right is not None:
        hidden |= j > i + mask.right
    if mask.left is not None:
        hidden |= j < i - mask.left
    return hidden


def _blocks(q_segments: Sequence[Segment], kv_segments: Segments, mask: Mask) -> Iterator[_Block]:
    """Yield every pair of query and key blocks in which some query sees some key."""
    keys: dict[int, list[tuple[Segment, int]]] = defaultdict(list)
    for segment, row in with_rows(kv_segments):
        keys[segment.document].append((segment, row))
    q_row = 0
    for q_segment in q_segments:
        for kv_segment, kv_row in keys.get(q_segment.document, []):
            for i in range(q_segment.start, q_segment.stop, BLOCK):
                i_stop = min(i + BLOCK, q_segment.stop)
                for j in range(kv_segment.start, kv_segment.stop, BLOCK):
                    j_stop = min(j + BLOCK, kv_segment.stop)
                    if pairs(i, i_stop, j, j_stop, mask):
                        q_at = q_row + i - q_segment.start
                        kv_at = kv_row + j - kv_segment.start
                        q_rows = slice(q_at, q_at + i_stop - i)
                        yield _Block(q_rows, slice(kv_at, kv_at + j_stop - j), i, j)
        q_row += q_segment.num_tokens
