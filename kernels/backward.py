"""Attention backward over tile maps: dK and dV by key tiles, dQ by query tiles.

With the final lse and delta = rowsum(do * o) each block of probabilities is computed anew:

    p  = exp(s - lse),  dp = do v^T,  ds = p (dp - delta)
    dv = p^T do,        dk = scale ds^T q,        dq = scale ds k

With a softcap, ds gets the factor 1 - tanh^2 before. The two kernels recompute p twice and need no
atomic addition, so sums run in one order on every run. The key kernel walks all query heads of a
KV head and computes the *transposed* blocks s^T = k q^T and dp^T = v do^T: both products are then
operands as they stand.

Layout: q, do, dq [T, H, D], k, v, dk, dv [T_kv, H_kv, D], lse and delta [H, T] float32, in nats.
Source: Dao, arXiv:2307.08691, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from hexiseq_triton.kernels.blocks import (
    LOG2E,
    NOWHERE,
    VARYING,
    capped,
    dot,
    key_range,
    load_block,
    load_span,
    load_tile,
    product,
    store_block,
    visible,
    work_item,
)
from hexiseq_triton.kernels.launch import Launch, Rows
from hexiseq_triton.kernels.launch_tables import GRAD_KV, GRAD_Q, config_for
from hexiseq_triton.kernels.options import AttentionOptions, HeadMap
from hexiseq_triton.kernels.tilemap import key_tiles, query_tiles
from hexiseq_triton.segments import Segment


@triton.jit
def _add_queries(
    dk, dv, keys, values, q, do, lse, delta, row, num_rows, head,
    stride_qt, stride_qh, stride_dot, stride_doh, stride_row,
    q_position, k_position, scale, cap_scale, cap, left, right,
    BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    DESCRIPTORS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Add what queries [row, row + BLOCK_M) of one head, `num_rows` of which exist, give."""
    offsets = tl.arange(0, BLOCK_M)
    row_at = head * stride_row + row + offsets  # in int32, which spares registers
    lse_at = lse + row_at
    delta_at = delta + row_at
    queries = load_block(
        q, row, num_rows, head, stride_qt, stride_qh, BLOCK_M, HEAD_DIM, D,
        not MASKED, DESCRIPTORS,
    )  # fmt: skip
    if MASKED:
        # p becomes 0 in rows that do not exist and in those that saw no key
        row_lse = tl.load(lse_at, mask=offsets < num_rows, other=float("-inf"))
        row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse)
    else:
        row_lse = tl.load(lse_at)
    # [BLOCK_N, BLOCK_M]
    s = product(keys, tl.trans(queries), UPCAST)
    if SOFTCAP:
        tanh = capped(s, cap_scale)
        s = cap * tanh
    if MASKED:
        low, high = key_range(q_position + offsets, left, right, HAS_LEFT, HAS_RIGHT)
        seen = visible(k_position[:, None], low[None, :], high[None, :], HAS_LEFT)
        s = tl.where(seen, s, float("-inf"))
    p = tl.exp2(s * scale - (row_lse * LOG2E)[None, :])
    grads = load_block(
        do, row, num_rows, head, stride_dot, stride_doh, BLOCK_M, HEAD_DIM, D,
        not MASKED, DESCRIPTORS,
    )  # fmt: skip
    dv = dot(p.to(grads.dtype), grads, dv, UPCAST)
    dp = product(values, tl.trans(grads), UPCAST)
    if MASKED:
        row_delta = tl.load(delta_at, mask=offsets < num_rows, other=0.0)
    else:
        row_delta = tl.load(delta_at)
    ds = p * (dp - row_delta[None, :])
    if SOFTCAP:
        ds = ds * (1.0 - tanh * tanh)
    dk = dot(ds.to(queries.dtype), queries, dk, UPCAST)
    return dk, dv


@triton.jit
def _grad_kv_tile(
    step, q, k, v, do, lse, delta, dk, dv, tile_map,
    num_tiles, num_heads, num_kv_heads, heads_together, q_head_start, q_per_kv,
    scale, cap_scale, cap, left, right, softmax_scale,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
    stride_dot, stride_doh, stride_row, stride_dkt, stride_dkh, stride_dvt, stride_dvh,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    ACCUMULATE: tl.constexpr, DESCRIPTORS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    tile, kv_head = work_item(step, num_tiles, num_kv_heads, heads_together)
    row, num_rows, position, full_begin, edge_begin, edge_end = load_tile(tile_map, tile)
    # the query heads of this KV head, of those that are here
    first_group = q_head_start // q_per_kv
    head_begin = tl.maximum((first_group + kv_head) * q_per_kv - q_head_start, 0)
    head_end = tl.minimum((first_group + kv_head + 1) * q_per_kv - q_head_start, num_heads)
    group = head_end - head_begin

    k_position = position + tl.arange(0, BLOCK_N)
    # [BLOCK_N, D]
    keys = load_block(
        k, row, num_rows, kv_head, stride_kt, stride_kh, BLOCK_N, HEAD_DIM, D,
        False, DESCRIPTORS,
    )  # fmt: skip
    values = load_block(
        v, row, num_rows, kv_head, stride_vt, stride_vh, BLOCK_N, HEAD_DIM, D,
        False, DESCRIPTORS,
    )  # fmt: skip
    dk_block = tl.zeros([BLOCK_N, D], tl.float32)
    dv_block = tl.zeros([BLOCK_N, D], tl.float32)

    for span in tl.range(edge_begin, edge_end, disable_licm=True):
        q_row, q_rows, q_position = load_span(tile_map, num_tiles, span)
        blocks = tl.cdiv(q_rows, BLOCK_M)
        for i in tl.range(0, group * blocks, disable_licm=True):
            at = i % blocks * BLOCK_M
            dk_block, dv_block = _add_queries(
                dk_block, dv_block, keys, values, q, do, lse, delta,
                q_row + at, q_rows - at, head_begin + i // blocks,
                stride_qt, stride_qh, stride_dot, stride_doh, stride_row,
                q_position + at, k_position, scale, cap_scale, cap, left, right,
                BLOCK_M, HEAD_DIM, D, True, HAS_LEFT, HAS_RIGHT, SOFTCAP, DESCRIPTORS, UPCAST,
            )  # fmt: skip
    for span in tl.range(full_begin, edge_begin, disable_licm=True):
        q_row, q_rows, q_position = load_span(tile_map, num_tiles, span)
        blocks = tl.cdiv(q_rows, BLOCK_M)
        for i in tl.range(0, group * blocks, disable_licm=True):
            at = i % blocks * BLOCK_M
            dk_block, dv_block = _add_queries(
                dk_block, dv_block, keys, values, q, do, lse, delta,
                q_row + at, q_rows - at, head_begin + i // blocks,
                stride_qt, stride_qh, stride_dot, stride_doh, stride_row,
                q_position + at, k_position, scale, cap_scale, cap, left, right,
                BLOCK_M, HEAD_DIM, D, False, HAS_LEFT, HAS_RIGHT, SOFTCAP, DESCRIPTORS, UPCAST,
            )  # fmt: skip

    store_block(
        dv, dv_block, row, num_rows, kv_head, stride_dvt, stride_dvh, BLOCK_N, HEAD_DIM, D,
        ACCUMULATE,
    )  # fmt: skip
    store_block(
        dk, dk_block * softmax_scale, row, num_rows, kv_head, stride_dkt, stride_dkh,
        BLOCK_N, HEAD_DIM, D, ACCUMULATE,
    )  # fmt: skip


@triton.jit(do_not_specialize=[*VARYING, "num_kv_heads"])
def _grad_kv_kernel(
    q, k, v, do, lse, delta, dk, dv, tile_map,
    num_tiles, num_heads, num_kv_heads, heads_together, q_head_start, q_per_kv,
    scale, cap_scale, cap, left, right, softmax_scale,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
    stride_dot, stride_doh, stride_row, stride_dkt, stride_dkh, stride_dvt, stride_dvh,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    ACCUMULATE: tl.constexpr, DESCRIPTORS: tl.constexpr, UPCAST: tl.constexpr,
    PERSISTENT: tl.constexpr,
):  # fmt: skip
    if PERSISTENT:
        for step in tl.range(
            tl.program_id(0), num_tiles * num_kv_heads, tl.num_programs(0), disable_licm=True
        ):
            _grad_kv_tile(
                step, q, k, v, do, lse, delta, dk, dv, tile_map,
                num_tiles, num_heads, num_kv_heads, heads_together, q_head_start, q_per_kv,
                scale, cap_scale, cap, left, right, softmax_scale,
                stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
                stride_dot, stride_doh, stride_row, stride_dkt, stride_dkh, stride_dvt, stride_dvh,
                BLOCK_M, BLOCK_N, HEAD_DIM, D,
                HAS_LEFT, HAS_RIGHT, SOFTCAP,
                ACCUMULATE, DESCRIPTORS, UPCAST,
            )  # fmt: skip
    else:
        _grad_kv_tile(
            tl.program_id(0), q, k, v, do, lse, delta, dk, dv, tile_map,
            num_tiles, num_heads, num_kv_heads, heads_together, q_head_start, q_per_kv,
            scale, cap_scale, cap, left, right, softmax_scale,
            stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
            stride_dot, stride_doh, stride_row, stride_dkt, stride_dkh, stride_dvt, stride_dvh,
            BLOCK_M, BLOCK_N, HEAD_DIM, D,
            HAS_LEFT, HAS_RIGHT, SOFTCAP,
            ACCUMULATE, DESCRIPTORS, UPCAST,
        )  # fmt: skip


@triton.jit
def _add_keys(
    dq, queries, grads, row_lse, row_delta, k, v, row, num_rows, kv_head,
    stride_kt, stride_kh, stride_vt, stride_vh,
    low, high, k_position, scale, cap_scale, cap,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr,
    HAS_LEFT: tl.constexpr, SOFTCAP: tl.constexpr,
    DESCRIPTORS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Add what keys [row, row + BLOCK_N), `num_rows` of which exist, give to dq."""
    keys = load_block(
        k, row, num_rows, kv_head, stride_kt, stride_kh, BLOCK_N, HEAD_DIM, D,
        not MASKED, DESCRIPTORS,
    )  # fmt: skip
    # [BLOCK_M, BLOCK_N]
    s = product(queries, tl.trans(keys), UPCAST)
    if SOFTCAP:
        tanh = capped(s, cap_scale)
        s = cap * tanh
    p = tl.exp2(s * scale - row_lse[:, None])
    if MASKED:
        offsets = tl.arange(0, BLOCK_N)
        positions = tl.where(offsets < num_rows, k_position + offsets, NOWHERE)
        seen = visible(positions[None, :], low[:, None], high[:, None], HAS_LEFT)
        p = tl.where(seen, p, 0.0)
    values = load_block(
        v, row, num_rows, kv_head, stride_vt, stride_vh, BLOCK_N, HEAD_DIM, D,
        not MASKED, DESCRIPTORS,
    )  # fmt: skip
    dp = product(grads, tl.trans(values), UPCAST)
    ds = p * (dp - row_delta[:, None])
    if SOFTCAP:
        ds = ds * (1.0 - tanh * tanh)
    return dot(ds.to(keys.dtype), keys, dq, UPCAST)


@triton.jit
def _grad_q_tile(
    step, q, k, v, do, lse, delta, dq, tile_map,
    num_tiles, num_heads, heads_together, q_head_start, q_per_kv,
    scale, cap_scale, cap, left, right, softmax_scale,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
    stride_dot, stride_doh, stride_row, stride_dqt, stride_dqh,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    ACCUMULATE: tl.constexpr, DESCRIPTORS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    tile, head = work_item(step, num_tiles, num_heads, heads_together)
    row, num_rows, position, full_begin, edge_begin, edge_end = load_tile(tile_map, tile)
    kv_head = (q_head_start + head) // q_per_kv - q_head_start // q_per_kv
    offsets = tl.arange(0, BLOCK_M)
    in_tile = offsets < num_rows
    low, high = key_range(position + offsets, left, right, HAS_LEFT, HAS_RIGHT)
    # [BLOCK_M, D]
    queries = load_block(
        q, row, num_rows, head, stride_qt, stride_qh, BLOCK_M, HEAD_DIM, D,
        False, DESCRIPTORS,
    )  # fmt: skip
    grads = load_block(
        do, row, num_rows, head, stride_dot, stride_doh, BLOCK_M, HEAD_DIM, D,
        False, DESCRIPTORS,
    )  # fmt: skip
    row_at = head * stride_row + row + offsets
    lse_at = lse + row_at
    delta_at = delta + row_at
    row_lse = tl.load(lse_at, mask=in_tile, other=0.0) * LOG2E
    row_delta = tl.load(delta_at, mask=in_tile, other=0.0)
    dq_block = tl.zeros([BLOCK_M, D], tl.float32)

    for span in tl.range(full_begin, edge_begin, disable_licm=True):
        k_row, k_rows, k_position = load_span(tile_map, num_tiles, span)
        for at in tl.range(0, k_rows, BLOCK_N):
            dq_block = _add_keys(
                dq_block, queries, grads, row_lse, row_delta, k, v, k_row + at, k_rows - at,
                kv_head, stride_kt, stride_kh, stride_vt, stride_vh,
                low, high, k_position + at, scale, cap_scale, cap,
                BLOCK_N, HEAD_DIM, D, False, HAS_LEFT, SOFTCAP, DESCRIPTORS, UPCAST,
            )  # fmt: skip
    for span in tl.range(edge_begin, edge_end, disable_licm=True):
        k_row, k_rows, k_position = load_span(tile_map, num_tiles, span)
        for at in tl.range(0, k_rows, BLOCK_N):
            dq_block = _add_keys(
                dq_block, queries, grads, row_lse, row_delta, k, v, k_row + at, k_rows - at,
                kv_head, stride_kt, stride_kh, stride_vt, stride_vh,
                low, high, k_position + at, scale, cap_scale, cap,
                BLOCK_N, HEAD_DIM, D, True, HAS_LEFT, SOFTCAP, DESCRIPTORS, UPCAST,
            )  # fmt: skip

    store_block(
        dq, dq_block * softmax_scale, row, num_rows, head, stride_dqt, stride_dqh,
        BLOCK_M, HEAD_DIM, D, ACCUMULATE,
    )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def _grad_q_kernel(
    q, k, v, do, lse, delta, dq, tile_map,
    num_tiles, num_heads, heads_together, q_head_start, q_per_kv,
    scale, cap_scale, cap, left, right, softmax_scale,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
    stride_dot, stride_doh, stride_row, stride_dqt, stride_dqh,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    ACCUMULATE: tl.constexpr, DESCRIPTORS: tl.constexpr, UPCAST: tl.constexpr,
    PERSISTENT: tl.constexpr,
):  # fmt: skip
    if PERSISTENT:
        for step in tl.range(
            tl.program_id(0), num_tiles * num_heads, tl.num_programs(0), disable_licm=True
        ):
            _grad_q_tile(
                step, q, k, v, do, lse, delta, dq, tile_map,
                num_tiles, num_heads, heads_together, q_head_start, q_per_kv,
                scale, cap_scale, cap, left, right, softmax_scale,
                stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
                stride_dot, stride_doh, stride_row, stride_dqt, stride_dqh,
                BLOCK_M, BLOCK_N, HEAD_DIM, D,
                HAS_LEFT, HAS_RIGHT, SOFTCAP,
                ACCUMULATE, DESCRIPTORS, UPCAST,
            )  # fmt: skip
    else:
        _grad_q_tile(
            tl.program_id(0), q, k, v, do, lse, delta, dq, tile_map,
            num_tiles, num_heads, heads_together, q_head_start, q_per_kv,
            scale, cap_scale, cap, left, right, softmax_scale,
            stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
            stride_dot, stride_doh, stride_row, stride_dqt, stride_dqh,
            BLOCK_M, BLOCK_N, HEAD_DIM, D,
            HAS_LEFT, HAS_RIGHT, SOFTCAP,
            ACCUMULATE, DESCRIPTORS, UPCAST,
        )  # fmt: skip


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
    kv_segments: Sequence[Segment],
    heads: HeadMap,
    options: AttentionOptions,
    *,
    accumulate: bool = True,
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
        sm_margin: multiprocessors to leave to other kernels.

    Raises:
        ValueError: if a dtype, head dimension, shape or stride is not supported.
    """
    launch = Launch(q, k, v, heads, options)
    state = torch.float32 if accumulate else None
    launch.expect("do", do, tuple(q.shape), q.dtype)
    launch.expect("lse", lse, (q.shape[1], q.shape[0]), torch.float32)
    launch.expect("delta", delta, (q.shape[1], q.shape[0]), torch.float32)
    if q.shape[1] > 1 and delta.stride(0) != lse.stride(0):
        raise ValueError(
            f"delta has stride {delta.stride(0)} and lse {lse.stride(0)}; make them equal"
        )
    if lse.stride(0) * lse.shape[0] >= 1 << 31:
        raise ValueError(f"lse has {lse.shape[0]} rows of stride {lse.stride(0)}: 2**31 or more")
    launch.expect("dq", dq, tuple(q.shape), state)
    launch.expect("dk", dk, tuple(k.shape), state)
    launch.expect("dv", dv, tuple(k.shape), state)
    descriptors = launch.fits_descriptors(q, k, v, do)
    inputs = [Rows(x) for x in (q, k, v, do)]
    strides = [s for rows in inputs for s in rows.strides] + [lse.stride(0)]

    config = config_for(GRAD_KV, q)
    with_descriptors = config.descriptors and descriptors
    m, n = config.block_m, config.block_n
    tiles = key_tiles(
        q_segments, kv_segments, options.mask, m, n, q.device, keep_empty=not accumulate
    )
    items = tiles.num_tiles * k.shape[1]
    if items:
        grads = Rows(dk), Rows(dv)
        programs = config.num_programs(items, q.device, sm_margin)
        _grad_kv_kernel[(programs,)](
            *(x.source(b, with_descriptors) for x, b in zip(inputs, (m, n, n, m), strict=True)),
            lse,
            delta,
            dk,
            dv,
            tiles.table,
            tiles.num_tiles,
            q.shape[1],
            k.shape[1],
            launch.kv_heads_together(q, 2, heads.q_per_kv),
            *launch.scalars,
            options.softmax_scale,
            *strides,
            *grads[0].strides,
            *grads[1].strides,
            BLOCK_M=m,
            BLOCK_N=n,
            **launch.flags,
            ACCUMULATE=accumulate,
            DESCRIPTORS=with_descriptors,
            PERSISTENT=programs < items,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )

    config = config_for(GRAD_Q, q)
    with_descriptors = config.descriptors and descriptors
    m, n = config.block_m, config.block_n
    tiles = query_tiles(
        q_segments, kv_segments, options.mask, m, n, q.device, keep_empty=not accumulate
    )
    items = tiles.num_tiles * q.shape[1]
    if items:
        programs = config.num_programs(items, q.device, sm_margin)
        _grad_q_kernel[(programs,)](
            *(x.source(b, with_descriptors) for x, b in zip(inputs, (m, n, n, m), strict=True)),
            lse,
            delta,
            dq,
            tiles.table,
            tiles.num_tiles,
            q.shape[1],
            launch.kv_heads_together(k, 2, 1) * heads.q_per_kv,
            *launch.scalars,
            options.softmax_scale,
            *strides,
            *Rows(dq).strides,
            BLOCK_M=m,
            BLOCK_N=n,
            **launch.flags,
            ACCUMULATE=accumulate,
            DESCRIPTORS=with_descriptors,
            PERSISTENT=programs < items,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
