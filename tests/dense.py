"""The oracle: dense softmax attention, one document at a time, differentiated by autograd.

It shares nothing with the package: no segments, no blocks, no running state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    document_lengths: Sequence[int],
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    softmax_scale: float | None = None,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention of packed documents; q [T, H, D], k and v [T, H_kv, D]; output as q.

    A sink [H] is one more column of scores, whose value is 0.
    """
    group = q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    outputs = []
    start = 0
    for length in document_lengths:
        rows = slice(start, start + length)
        start += length
        keys = k[rows].repeat_interleave(group, dim=1)
        values = v[rows].repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[rows], keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        i = torch.arange(length, device=q.device)[:, None]
        j = torch.arange(length, device=q.device)[None, :]
        visible = torch.ones(length, length, dtype=torch.bool, device=q.device)
        if causal:
            visible &= j <= i
        if window_size[0] >= 0:
            visible &= j >= i - window_size[0]
        if window_size[1] >= 0:
            visible &= j <= i + window_size[1]
        scores = scores.masked_fill(~visible, -torch.inf)
        if sink is not None:
            scores = torch.cat([scores, sink[:, None, None].expand(-1, length, 1)], dim=-1)
            values = torch.cat([values, torch.zeros_like(values[:1])])
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
    return torch.cat([*outputs, q[:0]])
