"""dQ by query tiles: a program keeps dq of a tile and walks the keys that its queries see.

The mathematics and the layout are those of backward.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hexiseq_triton.kernels.backward_inputs import BackwardInputs, Tensors
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
from hexiseq_triton.kernels.configs import Config
from hexiseq_triton.kernels.kept import kept
from hexiseq_triton.kernels.launch_tables import GRAD_Q, config_for
from hexiseq_triton.kernels.prepared import Prepared
from hexiseq_triton.kernels.tilemap import query_tiles


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
        tanh = capped(s, cap_scale, keys.dtype)
        s = cap * tanh
    p = tl.exp2(s * scale - row_lse[:, None])
    if MASKED:
        offsets = tl.arange(0, BLOCK_N)
        positions = tl.where(offsets < num_rows, k_position + offsets, NOWHERE)
        seen = visible(positions[None, :], low[:, None], high[:, None], HAS_LEFT)
        p = tl.where(seen, p, 0.0)
    if SOFTCAP:
        p = p * (1.0 - tanh * tanh)  # here, so that tanh does not outlive the product
    values = load_block(
        v, row, num_rows, kv_head, stride_vt, stride_vh, BLOCK_N, HEAD_DIM, D,
        not MASKED, DESCRIPTORS,
    )  # fmt: skip
    dp = product(grads, tl.trans(values), UPCAST)
    ds = p * (dp - row_delta[:, None])
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
    if DESCRIPTORS and D <= 128:
        # any operation between load and product: so these operands stay in registers, which
        # halves the reads of shared memory and leaves room there for one more stage
        queries = tl.where(in_tile[:, None], queries, 0.0).to(queries.dtype)
        grads = tl.where(in_tile[:, None], grads, 0.0).to(grads.dtype)
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


def grad_q(inputs: BackwardInputs, tensors: Tensors, dq: torch.Tensor) -> None:
    """Write dq, [T, H, D] in any float dtype; with `inputs.accumulate` add to it, in fp32."""
    launch = prepare_grad_q(inputs, config_for(GRAD_Q, tensors[0], inputs.sm_margin))
    if launch is not None:
        launch(*tensors, dq)


@kept
def prepare_grad_q(inputs: BackwardInputs, config: Config) -> Prepared | None:
    """Return the launch; None where there is nothing to do."""
    q = inputs.q
    tiles = query_tiles(
        *inputs.segments, inputs.launch.options.mask, config.block_m, config.block_n, q.device,
        keep_empty=not inputs.accumulate,
    )  # fmt: skip
    items = tiles.num_tiles * q.shape[1]
    if not items:
        return None
    programs = config.num_programs(items, q.device, inputs.sm_margin)
    scalars = (
        tiles.num_tiles,
        q.shape[1],
        inputs.launch.kv_heads_together(inputs.k, 2, 1) * inputs.launch.heads.q_per_kv,
        *inputs.launch.scalars,
        inputs.launch.options.softmax_scale,
        *inputs.strides,
        *inputs.dq.row_strides,
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
        _grad_q_kernel, (programs,), scalars, constants,
        tiles=tiles, blocks=[*inputs.bounded_blocks(config), None],
    )  # fmt: skip
