"""Attention forward over a tile map, with state that survives the launch.

A program keeps, for each row of its query tile, the largest score m so far, the total l of
exp(s - m) and the weighted sum of values:

    m'   = max(m, max s)
    l'   = exp(m - m') l   + sum exp(s - m')
    acc' = exp(m - m') acc + exp(s - m') v

A row of running state (o, lse) is the same thing with m = lse, l = 1 and the sum o. It joins after
the last key: one more step of the same form, and then o = acc / l, lse = m + log l.

Inside, scores are in base 2: exp(s) = exp2(s log2 e), and scale * log2 e is applied after the
maximum is found, one multiply-add for each score. A row without keys keeps m = -inf and l = 0.

Layout: q [T, H, D], k and v [T_kv, H_kv, D] with any strides but the last, which is 1;
o as q in float32, lse [H, T] float32 in natural log.
Source: Milakov and Gimelshein, arXiv:1805.02867; Dao, arXiv:2307.08691.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from hexiseq_triton.kernels.blocks import (
    LN2,
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
from hexiseq_triton.kernels.launch_tables import FORWARD, config_for
from hexiseq_triton.kernels.options import AttentionOptions, HeadMap
from hexiseq_triton.kernels.tilemap import query_tiles
from hexiseq_triton.segments import Segment


@triton.jit
def _attend(
    acc, m, total, q, k, v, row, num_rows, kv_head, stride_kt, stride_kh, stride_vt, stride_vh,
    low, high, k_position, scale, cap_scale, cap,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr,
    HAS_LEFT: tl.constexpr, SOFTCAP: tl.constexpr,
    DESCRIPTORS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Let the tile see keys [row, row + BLOCK_N), of which `num_rows` exist."""
    keys = load_block(
        k, row, num_rows, kv_head, stride_kt, stride_kh, BLOCK_N, HEAD_DIM, D,
        not MASKED, DESCRIPTORS,
    )  # fmt: skip
    # [BLOCK_M, BLOCK_N]
    s = product(q, tl.trans(keys), UPCAST)
    if SOFTCAP:
        s = cap * capped(s, cap_scale)
    if MASKED:
        offsets = tl.arange(0, BLOCK_N)
        positions = tl.where(offsets < num_rows, k_position + offsets, NOWHERE)
        seen = visible(positions[None, :], low[:, None], high[:, None], HAS_LEFT)
        s = tl.where(seen, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    pivot = m_new
    if MASKED:
        pivot = tl.where(m_new == float("-inf"), 0.0, m_new)  # keeps -inf - -inf out of exp2
    p = tl.exp2(s * scale - pivot[:, None])
    shrink = tl.exp2(m - pivot)
    total = total * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None]
    values = load_block(
        v, row, num_rows, kv_head, stride_vt, stride_vh, BLOCK_N, HEAD_DIM, D,
        not MASKED, DESCRIPTORS,
    )  # fmt: skip
    acc = dot(p.to(values.dtype), values, acc, UPCAST)
    return acc, m_new, total


@triton.jit
def _forward_tile(
    step, q, k, v, o, lse, out, tile_map,
    num_tiles, num_heads, heads_together, q_head_start, q_per_kv,
    scale, cap_scale, cap, left, right,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
    stride_ot, stride_oh, stride_lse, stride_outt, stride_outh,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, DESCRIPTORS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    tile, head = work_item(step, num_tiles, num_heads, heads_together)
    row, num_rows, position, full_begin, edge_begin, edge_end = load_tile(tile_map, tile)
    kv_head = (q_head_start + head) // q_per_kv - q_head_start // q_per_kv
    offsets = tl.arange(0, BLOCK_M)
    in_tile = offsets < num_rows
    low, high = key_range(position + offsets, left, right, HAS_LEFT, HAS_RIGHT)
    # [BLOCK_M, D]
    queries = load_block(
        q, row, num_rows, head, stride_qt, stride_qh, BLOCK_M, HEAD_DIM, D, False, DESCRIPTORS
    )

    lse_at = lse + head.to(tl.int64) * stride_lse + row + offsets
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)

    for span in tl.range(full_begin, edge_begin, disable_licm=True):
        k_row, k_rows, k_position = load_span(tile_map, num_tiles, span)
        for at in tl.range(0, k_rows, BLOCK_N):
            acc, m, total = _attend(
                acc, m, total, queries, k, v, k_row + at, k_rows - at, kv_head,
                stride_kt, stride_kh, stride_vt, stride_vh,
                low, high, k_position + at, scale, cap_scale, cap,
                BLOCK_N, HEAD_DIM, D, False, HAS_LEFT, SOFTCAP, DESCRIPTORS, UPCAST,
            )  # fmt: skip
    for span in tl.range(edge_begin, edge_end, disable_licm=True):
        k_row, k_rows, k_position = load_span(tile_map, num_tiles, span)
        for at in tl.range(0, k_rows, BLOCK_N):
            acc, m, total = _attend(
                acc, m, total, queries, k, v, k_row + at, k_rows - at, kv_head,
                stride_kt, stride_kh, stride_vt, stride_vh,
                low, high, k_position + at, scale, cap_scale, cap,
                BLOCK_N, HEAD_DIM, D, True, HAS_LEFT, SOFTCAP, DESCRIPTORS, UPCAST,
            )  # fmt: skip

    top = m
    if not FIRST:  # the old state joins here, where registers are free
        old = tl.load(lse_at, mask=in_tile, other=float("-inf")) * LOG2E
        top = tl.maximum(m, old)
    some = top > float("-inf")
    pivot = tl.where(some, top, 0.0)
    weight = tl.exp2(m - pivot)
    total = total * weight
    if not FIRST:
        old_weight = tl.exp2(old - pivot)
        total += old_weight
    inverse = tl.where(some, 1.0 / tl.where(some, total, 1.0), 0.0)
    acc = acc * (weight * inverse)[:, None]
    if not FIRST:
        acc += (old_weight * inverse)[:, None] * load_block(
            o, row, num_rows, head, stride_ot, stride_oh, BLOCK_M, HEAD_DIM, D, False, False
        )
    new_lse = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) * LN2, float("-inf"))
    tl.store(lse_at, new_lse, mask=in_tile)
    if LAST:
        store_block(
            out, acc, row, num_rows, head, stride_outt, stride_outh, BLOCK_M, HEAD_DIM, D, False
        )
    else:
        store_block(o, acc, row, num_rows, head, stride_ot, stride_oh, BLOCK_M, HEAD_DIM, D, False)


@triton.jit(do_not_specialize=VARYING)
def _forward_kernel(
    q, k, v, o, lse, out, tile_map,
    num_tiles, num_heads, heads_together, q_head_start, q_per_kv,
    scale, cap_scale, cap, left, right,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
    stride_ot, stride_oh, stride_lse, stride_outt, stride_outh,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, DESCRIPTORS: tl.constexpr, UPCAST: tl.constexpr,
    PERSISTENT: tl.constexpr,
):  # fmt: skip
    if PERSISTENT:
        for step in tl.range(
            tl.program_id(0), num_tiles * num_heads, tl.num_programs(0), disable_licm=True
        ):
            _forward_tile(
                step, q, k, v, o, lse, out, tile_map,
                num_tiles, num_heads, heads_together, q_head_start, q_per_kv,
                scale, cap_scale, cap, left, right,
                stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
                stride_ot, stride_oh, stride_lse, stride_outt, stride_outh,
                BLOCK_M, BLOCK_N, HEAD_DIM, D, HAS_LEFT, HAS_RIGHT, SOFTCAP,
                FIRST, LAST, DESCRIPTORS, UPCAST,
            )  # fmt: skip
    else:
        _forward_tile(
            tl.program_id(0), q, k, v, o, lse, out, tile_map,
            num_tiles, num_heads, heads_together, q_head_start, q_per_kv,
            scale, cap_scale, cap, left, right,
            stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
            stride_ot, stride_oh, stride_lse, stride_outt, stride_outh,
            BLOCK_M, BLOCK_N, HEAD_DIM, D, HAS_LEFT, HAS_RIGHT, SOFTCAP,
            FIRST, LAST, DESCRIPTORS, UPCAST,
        )  # fmt: skip


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor | None,
    lse: torch.Tensor,
    q_segments: Sequence[Segment],
    kv_segments: Sequence[Segment],
    heads: HeadMap,
    options: AttentionOptions,
    *,
    first: bool = False,
    out: torch.Tensor | None = None,
    sm_margin: int = 0,
) -> None:
    """Let the queries see one more chunk of keys: update (o, lse) in place.

    Args:
        q: queries, [T, H, D] bf16, fp16 or fp32; D is a multiple of 8 up to 256.
        k: keys, [T_kv, H_kv, D] in the dtype of q.
        v: values, as k.
        o: running output, [T, H, D] fp32. None where nothing is read from it or written to it:
            with `first` and `out`.
        lse: running log-sum-exp, [H, T] fp32 in nats, last stride 1.
        q_segments: positions of the queries.
        kv_segments: positions of the keys.
        heads: which KV head each query head reads.
        options: mask, scale and softcap.
        first: there is no state yet; o and lse are written, and never read.
        out: this is the last chunk; the output goes here, [T, H, D] in any float dtype, and o
            stays as it was. Rows without keys get 0.
        sm_margin: multiprocessors to leave to other kernels.

    Raises:
        ValueError: if a dtype, head dimension, shape or stride is not supported.
    """
    launch = Launch(q, k, v, heads, options)
    launch.expect("lse", lse, (q.shape[1], q.shape[0]), torch.float32)
    if out is not None:
        launch.expect("out", out, tuple(q.shape))
    if o is not None:
        launch.expect("o", o, tuple(q.shape), torch.float32)
    elif out is None or not first:
        raise ValueError("o is None; only a launch that is first and writes `out` needs no o")
    read, written = (out if o is None else o), (o if out is None else out)
    assert read is not None
    assert written is not None
    config = config_for(FORWARD, q)
    tiles = query_tiles(
        q_segments, kv_segments, options.mask, config.block_m, config.block_n, q.device,
        keep_empty=first or out is not None,
    )  # fmt: skip
    items = tiles.num_tiles * q.shape[1]
    if not items:
        return

    descriptors = config.descriptors and launch.fits_descriptors(q, k, v)
    rows_q, rows_k, rows_v = Rows(q), Rows(k), Rows(v)
    state, result = Rows(read), Rows(written)
    programs = config.num_programs(items, q.device, sm_margin)
    _forward_kernel[(programs,)](
        rows_q.source(config.block_m, descriptors),
        rows_k.source(config.block_n, descriptors),
        rows_v.source(config.block_n, descriptors),
        state.tensor,
        lse,
        result.tensor,
        tiles.table,
        tiles.num_tiles,
        q.shape[1],
        launch.kv_heads_together(k, 2, 1) * heads.q_per_kv,
        *launch.scalars,
        *rows_q.strides,
        *rows_k.strides,
        *rows_v.strides,
        *state.strides,
        lse.stride(0),
        *result.strides,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        **launch.flags,
        FIRST=first,
        LAST=out is not None,
        DESCRIPTORS=descriptors,
        PERSISTENT=programs < items,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
