"""Attention over packed documents as two PyTorch operators, for autograd and torch.compile.

    hexiseq_triton::attention_forward    q, k, v, sink                  -> out, lse
    hexiseq_triton::attention_backward   do, q, k, v, sink, out, lse    -> dq, dk, dv, dsink

The documents come as cu_seqlens *tensors*, and the operators read them inside. A compiled graph
then holds one opaque node whose output shapes follow from q and k alone: no graph break where the
numbers are needed on the host, no recompilation for other document lengths. With a list of numbers
as the argument, the caller would have to read the tensor, and torch.compile would stop there.
Also for the sake of the compiler, the largest lengths are checked inside. Each call reads them
anew: collectives, CUDA graphs, kernels and Inductor, which uses a buffer again for other documents,
change a tensor without a trace. From a GPU that waits; `flash` copies them to the CPU before.

What an operator returns is allocated by one function, for real and for fake tensors: contiguous,
whatever the strides of the inputs. So the compiler's idea of the strides cannot differ from theirs.

Backward needs delta = rowsum(do * out). The score s of a pair enters lse with the slope p, so a
gradient of lse only shifts delta:  ds = p (do v^T - (delta - dlse)). Where a sink takes its share,
p is exp(s - L) and the slope of s in lse is exp(s - lse). With both, exp(s - lse) is the p of
backward, and do and delta get the factor exp(lse - L): its inverse could be infinite.

Layout: q, out, do, dq [T, H, D]; k, v, dk, dv [T_kv, H_kv, D]; lse [H, T] and sink, dsink [H] in
the state dtype. An operator cannot return None: without a sink dsink is [0].
"""

from __future__ import annotations

from typing import Any

import torch

from hexiseq_triton.kernels.attention import attention_backward, attention_forward, row_dots
from hexiseq_triton.kernels.documents import (
    Offsets,
    Segments,
    aligned_segments,
    check_offsets,
)
from hexiseq_triton.kernels.options import (
    AttentionOptions,
    HeadMap,
    state_dtype,
    unit_last_stride,
)
from hexiseq_triton.kernels.sink import lse_with_sink, sink_gradient
from hexiseq_triton.segments import Mask

_Call = tuple[Segments, Segments, HeadMap, AttentionOptions]

_ON_HOST = (torch.Tag.cudagraph_unsafe,)
"""A CUDA graph would repeat the launches of the documents that it was captured with: Inductor is to
leave the operators out of its graphs (modes "reduce-overhead" and "max-autotune")."""


@torch.library.custom_op("hexiseq_triton::attention_forward", mutates_args=(), tags=_ON_HOST)
def packed_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    left: int | None,
    right: int | None,
    softmax_scale: float,
    softcap: float,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend, each document for itself; queries and keys of a document end together.

    Args:
        q: queries, [T, H, D], any strides; query head h reads KV head h // (H / H_kv).
        k: keys, [T_kv, H_kv, D], any strides.
        v: values, as k.
        sink: one more logit of each query head, [H] in the state dtype, in nats; None is none.
        cu_seqlens_q: first row of each document in q, then T; [num_docs + 1] int32 or int64.
        cu_seqlens_k: the same for k and v.
        max_seqlen_q: no document may have more queries; None checks nothing.
        max_seqlen_k: no document may have more keys.
        left: a query sees that many keys before its own position; None is all.
        right: a query sees that many keys after its own position.
        softmax_scale: multiplies q . k; positive.
        softcap: caps scores at c * tanh(s / c); 0.0 is off.
        deterministic: backward repeats bit for bit, also where that is slower.

    Returns:
        out [T, H, D] in the dtype of q, and lse [H, T] in the state dtype, in nats; 0 and -inf for
        queries that see no key. The sink counts in out and not in lse.

    Raises:
        InputError: if cu_seqlens don't fit the tensors.
    """
    offsets = _read(cu_seqlens_q), _read(cu_seqlens_k)
    check_offsets("q", offsets[0], q.shape[0], max_seqlen_q)
    check_offsets("k", offsets[1], k.shape[0], max_seqlen_k)
    call = _call(q, k, *offsets, left, right, softmax_scale, softcap)
    q, k, v = (unit_last_stride(x) for x in (q, k, v))
    out, lse = _new_outputs(q)
    attention_forward(q, k, v, None, lse, *call, first=True, out=out, sink=sink)
    return out, lse


@torch.library.custom_op("hexiseq_triton::attention_backward", mutates_args=(), tags=_ON_HOST)
def packed_backward(
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    left: int | None,
    right: int | None,
    softmax_scale: float,
    softcap: float,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dq, dk and dv in the shapes and dtype of q, k and v, and dsink as sink.

    Args:
        do: gradient of out, [T, H, D], any strides.
        dlse: gradient of lse, [H, T]; None is 0.
        q, k, v, sink: as in `packed_forward`.
        out: its output.
        lse: its log-sum-exp.
        cu_seqlens_q, cu_seqlens_k, left, right, softmax_scale, softcap, deterministic: as there.
    """
    offsets = _read(cu_seqlens_q), _read(cu_seqlens_k)
    call = _call(q, k, *offsets, left, right, softmax_scale, softcap)
    q, k, v, do = (unit_last_stride(x) for x in (q, k, v, do))
    delta = row_dots(do, out)
    dq, dk, dv, dsink = _new_gradients(q, k, v, sink)
    if sink is not None:
        total = lse_with_sink(lse, sink)
        dsink.copy_(sink_gradient(sink, total, delta))
        if dlse is None:
            lse = total
        else:
            share = torch.exp(lse - total).masked_fill(lse == -torch.inf, 0.0)
            do = (do * share.T[..., None]).to(do.dtype)
            delta *= share
    if dlse is not None:
        # lse of a row without keys is constant; merged with its like it has the gradient NaN
        delta -= dlse.masked_fill(lse == -torch.inf, 0.0)
    attention_backward(
        q, k, v, do, lse, delta, dq, dk, dv, *call, accumulate=False, deterministic=deterministic
    )
    return dq, dk, dv, dsink


@packed_forward.register_fake
def _(q, *_):
    return _new_outputs(q)


@packed_backward.register_fake
def _(do, dlse, q, k, v, sink, *_):
    return _new_gradients(q, k, v, sink)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, sink, cu_seqlens_q, cu_seqlens_k, _, _, *options = inputs
    ctx.save_for_backward(q, k, v, sink, *output, cu_seqlens_q, cu_seqlens_k)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    q, _, _, sink, *_ = saved = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(q)
    dq, dk, dv, dsink = packed_backward(do, dlse, *saved, *ctx.options)
    return dq, dk, dv, None if sink is None else dsink, *[None] * 9


packed_forward.register_autograd(_differentiate, setup_context=_save)


def _new_outputs(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return room for out and lse."""
    tokens, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(heads, tokens, dtype=state_dtype(q.dtype))


def _new_gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return room for dq, dk, dv and dsink."""
    heads = 0 if sink is None else q.shape[1]
    dsink = q.new_empty(heads, dtype=state_dtype(q.dtype))
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsink


def _read(cu_seqlens: torch.Tensor) -> Offsets:
    return tuple(cu_seqlens.tolist())


def _call(
    q: torch.Tensor,
    k: torch.Tensor,
    q_offsets: Offsets,
    k_offsets: Offsets,
    left: int | None,
    right: int | None,
    softmax_scale: float,
    softcap: float,
) -> _Call:
    """Return what the kernels want to know besides tensors."""
    segments = aligned_segments(q_offsets, k_offsets)
    heads = HeadMap(0, q.shape[1] // k.shape[1])
    return *segments, heads, AttentionOptions(Mask(left, right), softmax_scale, softcap)
