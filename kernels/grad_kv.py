"""dK and dV by key tiles.

A program keeps dk and dv of a key tile and walks the queries that see it, over all query heads of
its KV head. It computes the *transposed* blocks s^T = k q^T and dp^T = v do^T: the products p^T do
and ds^T q then take their operands as they stand.

The mathematics and the layout are those of backward.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hexiseq_triton.kernels.backward_inputs import BackwardInputs, Tensors
from hexiseq_triton.kernels.blocks import (
    LOG2E,
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
from hexiseq_triton.kernels.configs import Config
from hexiseq_triton.kernels.kept import kept
from hexiseq_triton.kernels.launch_tables import GRAD_KV, config_for
from hexiseq_triton.kernels.prepared import Prepared
from hexiseq_triton.kernels.tilemap import key_tiles


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
        tanh = capped(s, cap_scale, keys.dtype)
        slope = 1.0 - tanh * tanh  # here, so that tanh does not outlive the product
        s = cap * tanh
    if MASKED:
        low, high = key_range(q_position + offsets, left, right, HAS_LEFT, HAS_RIGHT)
        seen = visible(k_position[:, None], low[None, :], high[None, :], HAS_LEFT)
        s = tl.where(seen, s, float("-inf"))
    p = tl.exp2(s * scale - (row_lse * LOG2E)[None, :])
    weight = p
    if SOFTCAP:
        weight = p * slope
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
    ds = (weight * (dp - row_delta[None, :])).to(queries.dtype)
    dk = dot(ds, queries, dk, UPCAST)
    return dk, dv


@triton.jit
def _grad_kv_tile(
    step, q, k, v, do, lse, delta, dk, dv, tile_map,
    num_tiles, num_heads, num_kv_heads, heads_together, q_head_start, q_per_kv,
    scale, cap_scale, cap, left, right, softmax_scale,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
    stride_dot, stride_doh, stride_row,
    stride_dkt, stride_dkh, stride_dvt, stride_dvh,
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
                BLOCK_M, HEAD_DIM, D, True,
                HAS_LEFT, HAS_RIGHT, SOFTCAP, DESCRIPTORS, UPCAST,
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
                BLOCK_M, HEAD_DIM, D, False,
                HAS_LEFT, HAS_RIGHT, SOFTCAP, DESCRIPTORS, UPCAST,
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
    stride_dot, stride_doh, stride_row,
    stride_dkt, stride_dkh, stride_dvt, stride_dvh,
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
                stride_dot, stride_doh, stride_row,
                stride_dkt, stride_dkh, stride_dvt, stride_dvh,
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
            stride_dot, stride_doh, stride_row,
            stride_dkt, stride_dkh, stride_dvt, stride_dvh,
            BLOCK_M, BLOCK_N, HEAD_DIM, D,
            HAS_LEFT, HAS_RIGHT, SOFTCAP,
            ACCUMULATE, DESCRIPTORS, UPCAST,
        )  # fmt: skip


def grad_kv(inputs: BackwardInputs, tensors: Tensors, dk: torch.Tensor, dv: torch.Tensor) -> None:
    """Write dk and dv, [T_kv, H_kv, D] in any float dtype; with `inputs.accumulate` add in fp32."""
    launch = prepare_grad_kv(inputs, config_for(GRAD_KV, tensors[0], inputs.sm_margin))
    if launch is not None:
        launch(*tensors, dk, dv)


@kept
def prepare_grad_kv(inputs: BackwardInputs, config: Config) -> Prepared | None:
    """Return the launch; None where there is nothing to do."""
    q, k = inputs.q, inputs.k
    tiles = key_tiles(
        *inputs.segments, inputs.launch.options.mask, config.block_m, config.block_n, q.device,
        keep_empty=not inputs.accumulate,
    )  # fmt: skip
    items = tiles.num_tiles * k.shape[1]
    if not items:
        return None
    programs = config.num_programs(items, q.device, inputs.sm_margin)
    scalars = (
        tiles.num_tiles,
        q.shape[1],
        k.shape[1],
        inputs.launch.kv_heads_together(q, 2, inputs.launch.heads.q_per_kv),
        *inputs.launch.scalars,
        inputs.launch.options.softmax_scale,
        *inputs.strides,
        *inputs.dk.row_strides,
        *inputs.dv.row_strides,
    )
    constants = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        **inputs.launch.flags,
        "ACCUMULATE": inputs.accumulate,
        "DESCRIPTORS": inputs.uses_descriptors(config),
        "PERSISTENT": programs < items,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    return Prepared(
        _grad_kv_kernel, (programs,), scalars, constants,
        tiles=tiles, blocks=[*inputs.bounded_blocks(config), None, None],
    )  # fmt: skip
