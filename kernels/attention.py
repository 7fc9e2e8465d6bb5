"""Attention over segments: which implementation does the work.

    float64, or tensors on the CPU      reference.py: the definition; float64 is the oracle's dtype
    CUDA, bf16, fp16 or fp32            forward.py and backward.py, in Triton

All else is a ValueError; nothing falls back silently. Triton is imported on first use, so that
machines without it can plan and test.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from hexiseq_triton.kernels import reference
from hexiseq_triton.kernels.options import (
    AttentionOptions,
    HeadMap,
    Segments,
    kernels_refuse,
    state_dtype,
)
from hexiseq_triton.kernels.sink import join_sink
from hexiseq_triton.segments import Segment

_DEVICES = ("cpu", "cuda")


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor | None,
    lse: torch.Tensor,
    q_segments: Sequence[Segment],
    kv_segments: Segments,
    heads: HeadMap,
    options: AttentionOptions,
    *,
    first: bool = False,
    out: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    sm_margin: int = 0,
) -> None:
    """Let the queries see more keys, of one chunk or of several: update (o, lse) in place.

    Documents never leak into each other: a NaN or an infinity in one of them, or in a row of no
    segment, reaches no row of another. Within a document it may reach every row of the block.

    Args:
        q: queries, [T, H, D]; their positions are `q_segments`.
        k: keys, [T_kv, H_kv, D]; their positions are `kv_segments`, one after the other. Several
            chunks in one buffer are given as `PlacedSegment`s; nothing sees the rows between.
        v: values, as k.
        o: running output, [T, H, D] in the state dtype; may be None with `first` and `out`.
        lse: running log-sum-exp, [H, T] in the state dtype.
        heads: which KV head each query head reads.
        options: mask, scale and softcap.
        first: there is no state yet: o and lse are written, and not read.
        out: these are the last keys: the output goes here, [T, H, D], in any float dtype.
        sink: with `out`, one more logit of each query head, [H] in the state dtype, in nats,
            contiguous. `out` has it in its softmax; lse leaves it out.
        sm_margin: multiprocessors to leave to other kernels.

    Raises:
        ValueError: if the device, a dtype, the head dimension or a stride is not supported.
    """
    if not by_reference(q):
        from hexiseq_triton.kernels import forward

        call = (q_segments, kv_segments, heads, options)
        with _current(q.device):
            forward.attention_forward(
                q, k, v, o, lse, *call, first=first, out=out, sink=sink, sm_margin=sm_margin
            )
        return
    if sink is not None and out is None:
        raise ValueError("sink is given without `out`; it joins at the last launch only")
    if o is None:
        assert first
        assert out is not None
        o = q.new_empty(q.shape, dtype=lse.dtype)
    if first:
        o.zero_()
        lse.fill_(-torch.inf)
    with _without_autocast():
        reference.attention_forward(q, k, v, o, lse, q_segments, kv_segments, heads, options)
    if out is not None:
        out.copy_(o if sink is None else join_sink(o, lse, sink))


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
    """Add the part of the gradients that some keys have to dq, dk and dv, in place.

    Args:
        q: queries, [T, H, D].
        k: keys, [T_kv, H_kv, D].
        v: values, as k.
        do: gradient of the output, as q.
        lse: log-sum-exp over *all* keys of each query and its sink, [H, T] in the state dtype.
        delta: row sums of do * o, [H, T] in the state dtype.
        dq: gradient of q, [T, H, D] in the state dtype.
        dk: gradient of k, [T_kv, H_kv, D] in the state dtype.
        dv: gradient of v, as dk.
        q_segments, kv_segments, heads, options: as in `attention_forward`.
        accumulate: False writes dq, dk and dv, in any float dtype, and reads nothing from them;
            of dk and dv, the rows of `kv_segments`.
        deterministic: repeat bit for bit, also where that is slower.
        sm_margin: multiprocessors to leave to other kernels.

    Raises:
        ValueError: if the device, a dtype, the head dimension or a stride is not supported.
    """
    call = (q_segments, kv_segments, heads, options)
    if not by_reference(q):
        from hexiseq_triton.kernels import backward

        tensors = (q, k, v, do, lse, delta, dq, dk, dv)
        with _current(q.device):
            backward.attention_backward(
                *tensors, *call,
                accumulate=accumulate, deterministic=deterministic, sm_margin=sm_margin,
            )  # fmt: skip
        return
    sums = [dq, dk, dv]
    if not accumulate:
        sums = [x.new_zeros(x.shape, dtype=lse.dtype) for x in sums]
    with _without_autocast():
        reference.attention_backward(q, k, v, do, lse, delta, sums[0], sums[1], sums[2], *call)
    if not accumulate:
        for gradient, total in zip((dq, dk, dv), sums, strict=True):
            gradient.copy_(total)


def row_dots(do: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
    """Return delta = rowsum(do * o), [H, T] in the state dtype, of do and o [T, H, D]."""
    if not by_reference(do):
        from hexiseq_triton.kernels import delta

        with _current(do.device):
            return delta.row_dots(do, o)
    state = state_dtype(do.dtype)
    return (do.to(state) * o.to(state)).sum(-1).T.contiguous()


def by_reference(q: torch.Tensor) -> bool:
    """Return whether the reference does the work, by the rule above."""
    if q.device.type not in _DEVICES:
        raise ValueError(_elsewhere(q.device))
    return q.device.type == "cpu" or q.dtype == torch.float64


def refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Say why queries of a kind are not supported, by the rule above; None if they are."""
    if device.type not in _DEVICES:
        return _elsewhere(device)
    if device.type == "cpu" or dtype == torch.float64:
        return None
    return kernels_refuse(dtype, head_dim)


def _elsewhere(device: torch.device) -> str:
    return f"q is on {device}; supported: {' and '.join(_DEVICES)}"


def _without_autocast() -> AbstractContextManager[object]:
    """Keep autocast from rounding the operands of products; on a card it leaves float64 alone."""
    return torch.autocast("cpu", enabled=False)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the current one within; costs next to nothing where it already is."""
    if device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
