"""Attention backward over tile maps, in one of two forms.

With the final lse and delta = rowsum(do * o) each block of probabilities is computed anew:

    p  = exp(s - lse),  dp = do v^T,  ds = p (dp - delta)
    dv = p^T do,        dk = scale ds^T q,        dq = scale ds k

With a softcap, ds gets the factor 1 - tanh^2.

    split    grad_kv.py, then grad_q.py     p computed twice, every sum in one order on every run
    fused    hopper/backward.py             p computed once, dq by reductions into memory

The fused form, and a faster dk and dv of the split form (hopper/grad_kv.py), are Hopper kernels in
Gluon that run where guard.py lets them.

Layout: q, do, dq [T, H, D], k, v, dk, dv [T_kv, H_kv, D], lse and delta [H, T] float32, in nats.
Source: Dao, arXiv:2307.08691, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hexiseq_triton.kernels.backward_inputs import BackwardInputs, Tensors, backward_inputs
from hexiseq_triton.kernels.forms import forms
from hexiseq_triton.kernels.grad_kv import grad_kv
from hexiseq_triton.kernels.grad_q import grad_q
from hexiseq_triton.kernels.hopper import guard
from hexiseq_triton.kernels.interned import interned
from hexiseq_triton.kernels.options import AttentionOptions, HeadMap, Segments
from hexiseq_triton.segments import Segment


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
    *,
    accumulate: bool = True,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> None:
    """Add one chunk's part of the gradients to dq, dk and dv, in place.

    Args:
        q: queries, [T, H, D] bf16, fp16 or fp32; D is a multiple of 8 up to 256.
        k: keys of the chunk, [T_kv, H_kv, D] in the dtype of q.
        v: values of the chunk, as k.
        do: gradient of the output, as q.
        lse: log-sum-exp over *all* keys of each query, [H, T] fp32 in nats, last stride 1.
        delta: row sums of do * o, as lse, with the same strides.
        dq: gradient of q, [T, H, D] fp32.
        dk: gradient of k, [T_kv, H_kv, D] fp32.
        dv: gradient of v, as dk.
        q_segments: positions of the queries.
        kv_segments: positions of the keys.
        heads: which KV head each query head reads.
        options: mask, scale and softcap.
        accumulate: False writes dq, dk and dv, which may then have any float dtype, and reads
            nothing from them.
        deterministic: take the split form, whose results repeat bit for bit. So do
            `torch.use_deterministic_algorithms` and cards without the fused form.
        sm_margin: multiprocessors to leave to other kernels.

    Raises:
        ValueError: if a dtype, head dimension, shape or stride is not supported.
    """
    tensors = (q, k, v, do, lse, delta)
    keys = forms((*tensors, dq, dk, dv))
    segments = interned(q_segments), interned(kv_segments)
    inputs = backward_inputs(*keys, *segments, heads, options, accumulate, sm_margin)

    repeatable = deterministic or torch.are_deterministic_algorithms_enabled()
    if not repeatable and _fused_on_hopper(inputs, tensors, dq, dk, dv):
        return
    if not _grad_kv_on_hopper(inputs, tensors, dk, dv):
        grad_kv(inputs, tensors, dk, dv)
    if not _grad_q_on_hopper(inputs, tensors, dq):
        grad_q(inputs, tensors, dq)


def _fused_on_hopper(
    inputs: BackwardInputs,
    tensors: Tensors,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> bool:
    """Do the call with the fused Hopper kernel, and return True, where that takes it."""
    if not guard.runs("backward", tensors[0]):
        return False
    from hexiseq_triton.kernels.hopper import backward as hopper  # needs Gluon

    if not hopper.takes(inputs, dq):
        return False
    hopper.grad_fused(inputs, tensors, dq, dk, dv)
    return True


def _grad_kv_on_hopper(
    inputs: BackwardInputs, tensors: Tensors, dk: torch.Tensor, dv: torch.Tensor
) -> bool:
    """Do dk and dv with a Hopper kernel, and return True, where one takes the call."""
    if not guard.runs("grad_kv", tensors[0]):
        return False
    from hexiseq_triton.kernels.hopper import backward as hopper  # needs Gluon

    if not hopper.takes(inputs, None):
        return False
    hopper.grad_kv(inputs, tensors, dk, dv)
    return True


def _grad_q_on_hopper(inputs: BackwardInputs, tensors: Tensors, dq: torch.Tensor) -> bool:
    """Do dq with the Hopper kernel, and return True, where that takes the call."""
    if not guard.runs("grad_q", tensors[0]):
        return False
    from hexiseq_triton.kernels.hopper import grad_q as hopper  # needs Gluon

    if not inputs.uses_descriptors(hopper.CONFIG):
        return False
    hopper.grad_q(inputs, tensors, dq)
    return True
