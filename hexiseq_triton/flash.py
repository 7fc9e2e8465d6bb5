"""Attention on one GPU under flash-attention 2's names: argument order, defaults and meaning.

What is the same: causal masks and windows are aligned at the bottom right (the last query of a
document stands at its last key), window bounds are inclusive, -1 is unbounded, query head h reads
KV head h // (H / H_kv), and a query that sees no key gives 0. What is not supported raises.

What differs: lse may be differentiated; cu_seqlens may be on the CPU, which saves waiting for the
GPU; `None` in a window is -1; `learnable_sink` is there, under flash-attention 4's name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from hexiseq_triton.errors import InputError
from hexiseq_triton.kernels.attention import refusal
from hexiseq_triton.kernels.ops import packed_forward
from hexiseq_triton.kernels.options import MAX_SOFTCAP, AttentionOptions, state_dtype
from hexiseq_triton.segments import Mask

Window = tuple[int | None, int | None]
Attended = torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]
"""The output or, with `return_attn_probs`, (output, lse, None)."""


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    learnable_sink: torch.Tensor | None = None,
) -> Attended:
    """Attend over packed documents, each for itself. Differentiable, and torch.compile takes it.

    The host needs the document lengths. Each call with cu_seqlens on a GPU waits for that GPU to
    copy them, its backward does not; with cu_seqlens on the CPU, `.cpu()` once a batch, nothing
    waits.

    Args:
        q: queries, [T, H, D] bf16, fp16 or fp32, any strides.
        k: keys, [T_kv, H_kv, D]; H_kv divides H.
        v: values, as k. Their head dimension may be smaller, as in DeepSeek-V3; they are computed
            as wide as keys.
        cu_seqlens_q: row at which each document begins in q, then T; [num_docs + 1] int32 or
            int64. Documents may be empty.
        cu_seqlens_k: the same for k and v.
        max_seqlen_q: the most queries of a document, or more; None does not check.
        max_seqlen_k: the most keys of a document, or more.
        dropout_p: only 0.0.
        softmax_scale: multiplies q . k; D ** -0.5 if left out.
        causal: a query sees no key after its own position.
        window_size: a query sees that many keys to its left and right; -1 is unbounded.
        softcap: caps scores at c * tanh(s / c), with c up to 1e4; 0.0 is off.
        alibi_slopes: only None.
        deterministic: the gradients repeat bit for bit, also where that is slower; all else does
            in any case.
        return_attn_probs: return (out, lse, None) and not just out.
        block_table: only None.
        learnable_sink: one more logit of each query head, [H] in any floating dtype, not scaled
            and not capped. It takes part in the softmax and has no value.

    Returns:
        out, as q but with the head dimension of v; 0 where a query sees no key. With
        `return_attn_probs` also lse, [H, T] fp32 (fp64 for fp64 inputs): natural log of the sum of
        exp of each query's scores, after scale and softcap; -inf where it sees no key. The scores
        are those of keys: lse leaves the sink out, so that parts over different keys can be merged,
        and logaddexp(lse, learnable_sink[:, None]) has it in.

    Raises:
        InputError: if tensors don't fit each other or an argument is not supported.
        ConfigError: if a side of the window is below -1.
    """
    refuse_unsupported(dropout_p, alibi_slopes, block_table)
    _check_tensors(q, k, v, "[T, heads, head_dim]")
    check_sink(learnable_sink, q.shape[1], q.device)
    _check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q)
    _check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, q)
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if isinstance(longest, float):
            raise InputError(f"{name} is {longest}; it is a whole number or None")
    if not q.is_meta:  # here, where torch.compile makes one copy for all layers
        is_shared = cu_seqlens_k is cu_seqlens_q
        cu_seqlens_q = cu_seqlens_q.cpu()
        cu_seqlens_k = cu_seqlens_q if is_shared else cu_seqlens_k.cpu()
    documents = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out, lse = _attend(
        q, k, v, learnable_sink, documents,
        softmax_scale, causal, window_size, softcap, deterministic,
    )  # fmt: skip
    return (out, lse, None) if return_attn_probs else out


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: torch.Tensor | None = None,
) -> Attended:
    """Attend over sequences of equal length; nothing waits for the GPU.

    The arguments not named here are those of `flash_attn_varlen_func`.

    Args:
        q: queries, [B, S, H, D] bf16, fp16 or fp32; no copy is made where [B * S, H, D] is a view.
        k: keys, [B, S_kv, H_kv, D]; H_kv divides H, S_kv may differ from S.
        v: values, as k, or narrower.

    Returns:
        out, as q but with the head dimension of v; with `return_attn_probs` (out, lse, None), where
        lse is [B, H, S].

    Raises:
        InputError: if tensors don't fit each other or an argument is not supported.
        ConfigError: if a side of the window is below -1.
    """
    refuse_unsupported(dropout_p, alibi_slopes, None)
    _check_tensors(q, k, v, "[batch, seq, heads, head_dim]")
    check_sink(learnable_sink, q.shape[2], q.device)
    batch, seq_q, num_heads, _ = q.shape
    if k.shape[0] != batch:
        raise InputError(f"k has batch size {k.shape[0]}, q {batch}; they must be alike")
    starts = torch.arange(batch + 1, device="cpu")  # whatever the default device is
    documents = (starts * seq_q, starts * k.shape[1], None, None)
    out, lse = _attend(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), learnable_sink, documents,
        softmax_scale, causal, window_size, softcap, deterministic,
    )  # fmt: skip
    out = out.view(*q.shape[:-1], v.shape[-1])
    if not return_attn_probs:
        return out
    return out, lse.view(num_heads, batch, seq_q).transpose(0, 1).contiguous(), None


def refuse_unsupported(
    dropout_p: float, alibi_slopes: torch.Tensor | None, block_table: torch.Tensor | None
) -> None:
    """Raise an InputError for arguments of flash-attention 2's that are not supported."""
    if dropout_p:
        raise InputError(f"dropout_p is {dropout_p}; attention dropout is not supported: use 0.0")
    if alibi_slopes is not None:
        raise InputError("alibi_slopes is given; ALiBi is not supported: leave it out")
    if block_table is not None:
        raise InputError("block_table is given; a paged KV cache is not supported: leave it out")


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str) -> None:
    num_dims = layout.count(",") + 1
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.dim() != num_dims:
            raise InputError(f"{name} has shape {tuple(x.shape)}; expected {layout}")
        if x.dtype != q.dtype or not x.dtype.is_floating_point:
            raise InputError(f"{name} is {x.dtype}, q {q.dtype}; all must be one floating dtype")
        if x.device != q.device:
            raise InputError(f"{name} is on {x.device}, q on {q.device}; they must be together")
    check_values(k, v)
    if q.shape[-1] != k.shape[-1]:
        raise InputError(f"k has head dimension {k.shape[-1]}, q {q.shape[-1]}; they must be alike")
    check_supported(q)
    num_heads, num_kv_heads = q.shape[-2], k.shape[-2]
    if not num_heads or not num_kv_heads or num_heads % num_kv_heads:
        raise InputError(
            f"q has {num_heads} heads, k {num_kv_heads}; q needs a multiple of the heads of k"
        )


def check_values(k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise an InputError unless v fits k: as many values, each of as many numbers or fewer."""
    if v.shape[:-1] != k.shape[:-1]:
        raise InputError(
            f"v has shape {tuple(v.shape)}, k {tuple(k.shape)}; they must be alike, but for a "
            "smaller head dimension of v"
        )
    if not min(1, k.shape[-1]) <= v.shape[-1] <= k.shape[-1]:
        raise InputError(
            f"v has head dimension {v.shape[-1]}, k {k.shape[-1]}; values may be as wide as keys "
            "or narrower"
        )


def widened(v: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return values as wide as keys, with zeros behind their own numbers."""
    return v if v.shape[-1] == head_dim else F.pad(v, (0, head_dim - v.shape[-1]))


def narrowed(out: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return what values of `head_dim` numbers gave, without what their zeros gave."""
    return out if out.shape[-1] == head_dim else out[..., :head_dim].contiguous()


def check_tensor(name: str, x: object) -> None:
    """Raise an InputError unless x is a tensor."""
    if not isinstance(x, torch.Tensor):
        raise InputError(f"{name} is a {type(x).__name__}; pass a tensor")


def check_supported(q: torch.Tensor) -> None:
    """Raise an InputError if no implementation takes the device, dtype or head dimension of q."""
    # on "meta" nothing is computed, whoever would do it
    problem = None if q.is_meta else refusal(q.device, q.dtype, q.shape[-1])
    if problem:
        raise InputError(problem)


def _refuse_tangents(*inputs: torch.Tensor | None) -> None:
    """Raise if forward-mode differentiation is under way: PyTorch would drop the tangents."""
    if torch.compiler.is_compiling():
        return
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in inputs):
        raise InputError(
            "an input has a tangent (torch.func.jvp, forward_ad): forward-mode differentiation "
            "is not supported; use torch.autograd.grad"
        )


def check_sink(sink: torch.Tensor | None, num_heads: int, device: torch.device) -> None:
    """Raise an InputError unless the sink is None or fits the query heads."""
    if sink is None:
        return
    check_tensor("learnable_sink", sink)
    if sink.shape != (num_heads,) or not sink.dtype.is_floating_point:
        raise InputError(
            f"learnable_sink has shape {tuple(sink.shape)} and is {sink.dtype}; expected one "
            f"floating number for each query head, [{num_heads}]"
        )
    if sink.device != device:
        raise InputError(f"learnable_sink is on {sink.device}, q on {device}; move it there")


def options_of(
    head_dim: int,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
) -> AttentionOptions:
    """Return mask, scale and softcap as kernels take them.

    Raises:
        InputError: if the head dimension, scale or softcap is out of range, or asks for a gradient.
        ConfigError: if a side of the window is below -1.
    """
    if head_dim < 1:
        raise InputError(f"q has head dimension {head_dim}; it must be at least 1")
    for name, given in (("softmax_scale", softmax_scale), ("softcap", softcap)):
        if isinstance(given, torch.Tensor) and given.requires_grad:
            raise InputError(
                f"{name} requires grad; it is a number and would get no gradient: detach it, or "
                "multiply q by a scale that learns"
            )
    scale = head_dim**-0.5 if softmax_scale is None else float(softmax_scale)
    if not 0.0 < scale < math.inf:
        raise InputError(f"softmax_scale is {scale}; it must be positive and finite")
    if not 0.0 <= softcap <= MAX_SOFTCAP:
        raise InputError(
            f"softcap is {softcap}; it must be positive, at most {MAX_SOFTCAP:g}, or 0.0 for none"
        )
    if causal not in (True, False):
        raise InputError(f"causal is {causal!r}; it is True or False")
    if not isinstance(window_size, Sequence) or len(window_size) != 2:
        raise InputError(f"window_size is {window_size!r}; it is (left, right)")
    if not all(side is None or isinstance(side, int) for side in window_size):
        raise InputError(f"window_size is {window_size!r}; its sides are whole numbers or None")
    left, right = (-1 if side is None else side for side in window_size)
    return AttentionOptions(Mask.from_flash(causal, (left, right)), scale, float(softcap))


def _check_cu_seqlens(name: str, cu_seqlens: torch.Tensor, q: torch.Tensor) -> None:
    check_tensor(name, cu_seqlens)
    if cu_seqlens.is_meta and not q.is_meta:
        raise InputError(f"{name} is on meta, q on {q.device}: it holds no numbers")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise InputError(f"{name} is {cu_seqlens.dtype}; use torch.int32 or torch.int64")
    if cu_seqlens.dim() != 1 or not cu_seqlens.shape[0]:
        raise InputError(f"{name} has shape {tuple(cu_seqlens.shape)}; expected [num_docs + 1]")


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    documents: tuple[torch.Tensor, torch.Tensor, int | None, int | None],
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse of packed documents."""
    _refuse_tangents(q, k, v, sink)
    mask, scale, cap = options_of(q.shape[-1], softmax_scale, causal, window_size, softcap)
    if sink is not None:
        sink = sink.to(state_dtype(q.dtype)).contiguous()
    wide = widened(v, k.shape[-1])
    out, lse = packed_forward(q, k, wide, sink, *documents, *mask, scale, cap, deterministic)
    return narrowed(out, v.shape[-1]), lse
