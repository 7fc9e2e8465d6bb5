"""Exact attention under an uneven plan: the autograd function and its functional form.

Forward:  all-to-all in (keys first), attention over own and arriving keys, all-to-all out. A
learnable sink joins at the last launch, each head's on the ranks that hold the head.
Backward: dO in, with delta = rowsum(dO * O) from the token owner's saved output; keys fetched
again; partial dK/dV back to their owners; dq, dk, dv out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hexiseq_triton.context import ParallelContext
from hexiseq_triton.errors import InputError
from hexiseq_triton.flash import (
    Window,
    check_sink,
    check_supported,
    check_tensor,
    check_values,
    flash_attn_varlen_func,
    narrowed,
    options_of,
    refuse_unsupported,
    widened,
)
from hexiseq_triton.heads import KV
from hexiseq_triton.kernels import AttentionOptions, row_dots, state_dtype
from hexiseq_triton.kernels.rotation import Rotation
from hexiseq_triton.kernels.sink import lse_with_sink, sink_gradient
from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.peer_heads import head_exchange
from hexiseq_triton.ring import Ring
from hexiseq_triton.rope import RopeLike, as_rope

REDUCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def hexiseq_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    context: ParallelContext,
    layout: BatchLayout,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rope: RopeLike | None = None,
    learnable_sink: torch.Tensor | None = None,
    deterministic: bool = False,
    reduce_dtype: torch.dtype | None = None,
    dropout_p: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend over all tokens of the batch, each document for itself; a collective call.

    All ranks of a replica make their calls, and the backward of these, in the same order.

    Args:
        q: this rank's queries, [T, H, D] or [B, S, H, D] with B * S = T; T is `layout.num_tokens`.
        k: this rank's keys, as q with H_kv heads.
        v: this rank's values, as k. Their head dimension may be smaller, as in DeepSeek-V3; they
            travel and are computed as wide as keys.
        context: the live process groups of the plan.
        layout: the batch's layout, from `context.shard`.
        softmax_scale: multiplies q . k; D ** -0.5 if left out.
        causal: a query sees no key after its own position.
        window_size: a query sees that many keys to its left and right; -1 is unbounded.
        softcap: caps scores at c * tanh(s / c), with c up to 1e4; 0.0 is off.
        rope: turns q and k on their way: (cos, sin), each [T, D / 2] or [T, D], for the half-split
            form, or a `Rope`, for interleaved pairs and partial rotary too; without gradients.
        learnable_sink: one more logit of each of the model's query heads, [H] in any floating
            dtype, the same on all ranks; it takes part in the softmax and has no value. A rank's
            gradient is that of its own heads over its group's tokens, and 0 for other heads: like
            every parameter's, the ranks' gradients add up to the whole.
        deterministic: the gradients repeat bit for bit, also where that is slower.
        reduce_dtype: in which partial dK and dV travel back to the keys' owners, where they are
            summed in float32. None is float32 (float64 for float64 inputs); torch.bfloat16 halves
            what travels, and rounds every partial once; so does torch.float16, up to 65504.
        dropout_p: only 0.0.
        alibi_slopes: only None.

    Returns:
        The output, as q but with the head dimension of v.

    Raises:
        InputError: if a tensor doesn't fit the plan or the layout, or an argument is unsupported.
        PeerError: if another rank failed; the message is that rank's.
    """
    if torch.compiler.is_compiling() and layout.is_alone and rope is None:
        bounds = layout.cu_seqlens
        alone = flash_attn_varlen_func(
            q.flatten(0, -3), k.flatten(0, -3), v.flatten(0, -3), bounds, bounds, None, None,
            dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            learnable_sink=learnable_sink,
        )  # fmt: skip  # one opaque operation: the compiler does not stop
        assert isinstance(alone, torch.Tensor)
        return alone.view(*q.shape[:-1], v.shape[-1])
    arguments = (
        q, k, v, context, layout,
        softmax_scale, causal, window_size, softcap, rope, learnable_sink,
        deterministic, reduce_dtype, dropout_p, alibi_slopes,
    )  # fmt: skip
    if not torch.compiler.is_compiling():
        return _attend(*arguments)
    from hexiseq_triton import uncompiled

    out: torch.Tensor = uncompiled.call(_attend, *arguments)
    return out


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    context: ParallelContext,
    layout: BatchLayout,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    rope: RopeLike | None,
    learnable_sink: torch.Tensor | None,
    deterministic: bool,
    reduce_dtype: torch.dtype | None,
    dropout_p: float,
    alibi_slopes: torch.Tensor | None,
) -> torch.Tensor:
    """Check the call, agree on it with the other ranks, and carry it out."""
    with context.guard():
        refuse_unsupported(dropout_p, alibi_slopes, None)
        context.check_layout(layout)
        given = q
        q, k, v = (_rows(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
        _check(q, k, v, context, layout)
        check_sink(learnable_sink, context.plan.num_heads, q.device)
        if reduce_dtype is not None and reduce_dtype not in REDUCE_DTYPES:
            raise InputError(
                f"reduce_dtype is {reduce_dtype}; use None, or one of "
                f"{', '.join(map(str, REDUCE_DTYPES))}"
            )
        options = options_of(q.shape[-1], softmax_scale, causal, window_size, softcap)
        sink = None
        if learnable_sink is not None:
            sink = learnable_sink.to(state_dtype(q.dtype))
        rotation, style = None, "no rope"
        if rope is not None:
            rope = as_rope(rope)
            rotation, style = rope.rotation(q), rope.style
        held = f"{'no ' if sink is None else ''}sink, reduce_dtype {reduce_dtype}"
        # a rank that wants none would not take part in the others' backward
        wanted = torch.is_grad_enabled() and any(
            x is not None and x.requires_grad for x in (q, k, v, learnable_sink)
        )
        held += f", {'with' if wanted else 'no'} gradients"
        if v.shape != k.shape:
            held += f", values of {v.shape[-1]}"
        context.calls.agree_on_options(q.dtype, q.shape[-1], f"{options}, {style}, {held}")
        context.calls.agree_on_batch(layout)
    call = _Call(context, layout, options, deterministic, reduce_dtype)
    out: torch.Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        q, k, widened(v, k.shape[-1]), sink, call, rotation
    )
    return narrowed(out, v.shape[-1]).reshape(*given.shape[:-1], v.shape[-1])


def _rows(name: str, x: torch.Tensor) -> torch.Tensor:
    check_tensor(name, x)
    if x.dim() not in (3, 4):
        raise InputError(
            f"{name} has shape {tuple(x.shape)}; use [T, heads, D] or [B, S, heads, D]"
        )
    return x.flatten(0, -3)


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    context: ParallelContext,
    layout: BatchLayout,
) -> None:
    plan, tokens = context.plan, layout.num_tokens
    head_dim = plan.head_dim or q.shape[-1]
    for name, x, heads in (("q", q, plan.num_heads), ("k", k, plan.num_kv_heads)):
        if x.shape != (tokens, heads, head_dim):
            raise InputError(
                f"{name} has shape {tuple(x.shape)} on rank {context.rank}; plan and layout ask "
                f"for {(tokens, heads, head_dim)}: (tokens, heads, head_dim)"
            )
    check_values(k, v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype != q.dtype or not x.dtype.is_floating_point:
            raise InputError(f"{name} is {x.dtype}, q {q.dtype}; all must be one floating dtype")
        if x.device != context.device:
            raise InputError(f"{name} is on {x.device}; this context runs on {context.device}")
    check_supported(q)


class _Call(NamedTuple):
    """What one attention call is told, besides tensors."""

    context: ParallelContext
    layout: BatchLayout
    options: AttentionOptions
    deterministic: bool
    reduce_dtype: torch.dtype | None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        call: _Call,
        rotation: Rotation | None,
    ) -> torch.Tensor:
        context, layout = call.context, call.layout
        ctx.call = call
        ctx.kv_shape = k.shape
        if layout.replica is None:
            ctx.save_for_backward(sink)
            return torch.zeros_like(q)
        with context.guard(), context.first_call("forward"):
            span = context.timeline.span
            heads = head_exchange(context, layout, q)
            with span("all-to-all in"):
                inputs = heads.start_inputs(q, k, v, rotation)
                inputs.kv_pending.wait()
                ring = _ring(call, inputs.kv, q, wire=None)
                inputs.q_pending.wait()
            held = None if sink is None else sink[slice(*layout.share.q_heads)].contiguous()
            o = heads.outputs_room(q)
            lse = ring.forward(inputs.q, o, held)
            if held is not None:
                lse = lse_with_sink(lse, held)
            with span("all-to-all out"):
                out = heads.outputs_to_tokens(o)
        ctx.intervals = list(inputs.kv)
        ctx.interleaved = rotation is not None and rotation.interleaved
        angles = (None, None) if rotation is None else (rotation.cos, rotation.sin)
        ctx.save_for_backward(sink, inputs.q, lse, out, *angles, *inputs.kv.values())
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (do,) = grads
        context, layout, _, deterministic, reduce_dtype = ctx.call
        dk, dv = do.new_empty(ctx.kv_shape), do.new_empty(ctx.kv_shape)
        sink, *saved = ctx.saved_tensors
        dsink = None if sink is None else torch.zeros_like(sink)
        if layout.replica is None:
            return torch.zeros_like(do), dk.zero_(), dv.zero_(), dsink, None, None
        q_heads, lse, out, cos, sin, *parts = saved
        rotation = None if cos is None else Rotation(cos, sin, ctx.interleaved)
        with context.guard(), context.first_call("backward"):
            if torch.is_grad_enabled():
                raise InputError(
                    "attention's gradients cannot be differentiated again; call backward without "
                    "create_graph=True"
                )
            span = context.timeline.span
            heads = head_exchange(context, layout, do)
            kv = dict(zip(ctx.intervals, parts, strict=True))
            do = do.contiguous()  # a gradient may be one number, expanded
            ring = _ring(ctx.call, kv, do, wire=reduce_dtype or lse.dtype)
            with span("all-to-all in"):
                do_heads, blocks, pending = heads.start_gradients(do, row_dots(do, out))
                pending.wait()
            delta = torch.cat(blocks, dim=1)
            if dsink is not None:
                held = slice(*layout.share.q_heads)
                dsink[held] = sink_gradient(sink[held], lse, delta)
            own, dkv = heads.kv_gradient_room(do, sums=ring.exchanges)
            dq_heads = ring.backward(
                q_heads, do_heads, lse, delta, dkv, deterministic=deterministic
            )
            with span("all-to-all out"):
                dq = heads.gradients_to_tokens(dq_heads, own, dk, dv, rotation)
        return dq, dk, dv, dsink, None, None


def _ring(call: _Call, kv: KV, like: torch.Tensor, *, wire: torch.dtype | None) -> Ring:
    """Start the exchange of one call."""
    context = call.context
    return Ring(
        context.key_routes, call.layout, kv, like, call.options, context.timeline,
        wire=wire, sm_margin=context.sm_margin,
    )  # fmt: skip
