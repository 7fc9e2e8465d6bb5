"""flash-attention 2's packed calls, and dense attention aligned at the bottom right beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import hexiseq_triton as hx

NOTHING_SEEN = -torch.inf
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def aligned_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_lengths: Sequence[int],
    k_lengths: Sequence[int],
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    softmax_scale: float | None = None,
    learnable_sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse; the last query of a document stands at its last key.

    A sink shrinks the output by the sigmoid of how far lse stands above it.
    """
    group = q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    outputs, lses = [q[:0, :, : v.shape[-1]]], [q[:0, :, 0].T]
    documents = zip(q.split(q_lengths), k.split(k_lengths), v.split(k_lengths), strict=True)
    for queries, keys, values in documents:
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        visible = aligned_mask(len(queries), len(keys), causal, window_size)
        some = visible.any(-1)
        scores = scores.masked_fill(~visible & some[:, None], -torch.inf)  # finite where none
        p = scores.softmax(-1) * visible
        if learnable_sink is not None:
            above = scores.logsumexp(-1) - learnable_sink[:, None]
            p = p * torch.sigmoid(above)[..., None]
        outputs.append(torch.einsum("hqk,khd->qhd", p, values))
        lses.append(scores.logsumexp(-1).masked_fill(~some, NOTHING_SEEN))
    return torch.cat(outputs), torch.cat(lses, dim=1)


def aligned_mask(
    num_q: int, num_k: int, causal: bool, window_size: tuple[int, int]
) -> torch.Tensor:
    """Return which keys each query sees, [num_q, num_k]."""
    ahead = torch.arange(num_k) - (torch.arange(num_q)[:, None] + num_k - num_q)
    visible = torch.ones(num_q, num_k, dtype=torch.bool)
    if causal:
        visible &= ahead <= 0
    if window_size[0] >= 0:
        visible &= ahead >= -window_size[0]
    if window_size[1] >= 0:
        visible &= ahead <= window_size[1]
    return visible


def cu_seqlens(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def packed(
    q_lengths: Sequence[int],
    k_lengths: Sequence[int],
    per_kv: int = 1,
    kv_heads: int = 1,
    head_dim: int = 8,
    dtype: torch.dtype = torch.float64,
) -> list[torch.Tensor]:
    """Return random q, k and v that ask for gradients."""
    torch.manual_seed(0)
    keys = (sum(k_lengths), kv_heads, head_dim)
    shapes = ((sum(q_lengths), per_kv * kv_heads, head_dim), keys, keys)
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def varlen(
    qkv: Sequence[torch.Tensor], q_lengths: Sequence[int], k_lengths: Sequence[int], **options: Any
) -> Any:
    longest = max(q_lengths, default=0), max(k_lengths, default=0)
    offsets = cu_seqlens(q_lengths), cu_seqlens(k_lengths)
    return hx.flash_attn_varlen_func(*qkv, *offsets, *longest, **options)
