"""dQ for Hopper at head dimension 256, where there is no fused form (see grad_kv.py).

A program walks tiles of 128 queries, in snake order as the forward does. Two consumers own 64
queries each, whose q and do stay in shared memory; a producer warp loads blocks of 64 keys and
their values, which both read:

    s = q k^T,  p = exp(s - lse),  dp = do v^T,  ds = p (dp - delta),  dq += ds k

The consumers are independent: the softmax of one meets the products of the other. Results repeat
bit for bit.
"""

from __future__ import annotations

import torch

from hexiseq_triton.kernels.backward_inputs import BackwardInputs, Tensors
from hexiseq_triton.kernels.blocks import VARYING
from hexiseq_triton.kernels.configs import Config, num_sms
from hexiseq_triton.kernels.hopper.api import (
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from hexiseq_triton.kernels.hopper.blocks import (
    LOG2E,
    capped,
    copy_rows,
    get,
    load_rows,
    load_span,
    load_tile,
    num_items,
    store_rows,
    work_item,
)
from hexiseq_triton.kernels.hopper.guard import Guarded
from hexiseq_triton.kernels.hopper.key_work import constants_of, loaded_blocks, scalars_of
from hexiseq_triton.kernels.hopper.named import ALL, CONSUMER_AND_PRODUCER, arrive, meet_if
from hexiseq_triton.kernels.hopper.producer import UNMASKED, num_blocks, put
from hexiseq_triton.kernels.hopper.scores import seen_only
from hexiseq_triton.kernels.kept import kept
from hexiseq_triton.kernels.prepared import Prepared
from hexiseq_triton.kernels.tilemap import query_tiles

HEAD_DIM = 256
QUERIES = gl.constexpr(64)  # of a consumer
CONFIG = Config(QUERIES.value, 64, 4, 2, descriptors=True)
KEYS_FREE = gl.constexpr(4)
"""The named barriers of keys by stage, of values, and of queries by consumer."""
VALUES_FREE = gl.constexpr(6)
QUERIES_FREE = gl.constexpr(8)


@gluon.jit
def _produce(
    q, k, v, do, tile_map, queries, grads, keys, values, diagonals, counts,
    q_full, k_full, v_full,
    num_tiles, num_heads, heads_together, q_head_start, q_per_kv,
    stride_qh, stride_kh, stride_vh, stride_doh,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    stage = 0
    block = 0
    for turn in range(num_items(num_tiles * num_heads, programs, program)):
        tile, head = work_item(turn, programs, program, num_tiles, num_heads, heads_together)
        row, num_rows, position, full_begin, edge_begin, edge_end = load_tile(tile_map, tile)
        kv_head = (q_head_start + head) // q_per_kv - q_head_start // q_per_kv
        for w in gl.static_range(2):
            at = w * QUERIES
            meet_if(turn > 0, QUERIES_FREE + w, CONSUMER_AND_PRODUCER)
            mbarrier.expect(q_full.index(w), q.block_type.nbytes + do.block_type.nbytes)
            copy_rows(
                q, row + at, num_rows - at, head * stride_qh, q_full.index(w), queries.index(w)
            )
            copy_rows(
                do, row + at, num_rows - at, head * stride_doh, q_full.index(w), grads.index(w)
            )
        for span in range(full_begin, edge_end):
            k_row, k_rows, k_position = load_span(tile_map, num_tiles, span)
            for at in range(0, k_rows, BLOCK_N):
                meet_if(block >= STAGES, KEYS_FREE + stage, ALL)
                mbarrier.expect(k_full.index(stage), k.block_type.nbytes)
                copy_rows(
                    k, k_row + at, k_rows - at, kv_head * stride_kh,
                    k_full.index(stage), keys.index(stage),
                )  # fmt: skip
                distance = gl.where(span >= edge_begin, k_position + at - position, UNMASKED)
                put(diagonals.index(stage), distance)
                put(counts.index(stage), k_rows - at)
                mbarrier.arrive(k_full.index(stage), count=1)
                meet_if(block > 0, VALUES_FREE, ALL)
                mbarrier.expect(v_full, v.block_type.nbytes)
                copy_rows(v, k_row + at, k_rows - at, kv_head * stride_vh, v_full, values.index(0))
                block += 1
                stage += 1
                if stage == STAGES:
                    stage = 0


@gluon.jit
def _consume(
    W: gl.constexpr, lse, delta, dq, tile_map,
    queries, grads, keys, values, diagonals, counts,
    q_full, k_full, v_full,
    num_tiles, num_heads, heads_together,
    scale, cap_scale, cap, left, right, softmax_scale,
    stride_row, stride_dqt, stride_dqh,
    BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    HAS_LEFT: gl.constexpr, SOFTCAP: gl.constexpr,
    ACCUMULATE: gl.constexpr,
):  # fmt: skip
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    AL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=AL, k_width=2)
    RL: gl.constexpr = gl.SliceLayout(1, SL)
    DTYPE: gl.constexpr = keys.dtype
    # of a pair that does not see each other: no probability, or a capped score that gives none
    UNSEEN: gl.constexpr = -1e10 if SOFTCAP else 0.0
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    zeros = gl.zeros([QUERIES, BLOCK_N], gl.float32, SL)
    query = W * QUERIES + gl.arange(0, QUERIES, RL)
    stage = 0
    phase = 0
    block = 0
    for turn in range(num_items(num_tiles * num_heads, programs, program)):
        tile, head = work_item(turn, programs, program, num_tiles, num_heads, heads_together)
        row, num_rows, _position, full_begin, _border, edge_end = load_tile(tile_map, tile)
        row_at = head.to(gl.int64) * stride_row + row + query
        inside = query < num_rows
        row_lse = gl.load(lse + row_at, mask=inside, other=float("-inf"))
        # p is 0 in rows that do not exist and in those that saw no key
        row_lse = gl.where(row_lse == float("-inf"), float("inf"), row_lse * LOG2E)
        row_delta = gl.load(delta + row_at, mask=inside, other=0.0)
        blocks = num_blocks(tile_map, num_tiles, full_begin, edge_end, BLOCK_N)
        total = gl.zeros([QUERIES, D], gl.float32, AL)
        mbarrier.wait(q_full.index(W), turn & 1)
        for i in range(blocks):
            o = W + (i >> 30)  # W, which the compiler must not know
            mbarrier.wait(k_full.index(stage), phase)
            s = warpgroup_mma(
                queries.index(o), keys.index(stage).permute((1, 0)), zeros,
                use_acc=False, is_async=True,
            )  # fmt: skip
            mbarrier.wait(v_full, block & 1)
            dp = warpgroup_mma(
                grads.index(o), values.index(i >> 30).permute((1, 0)), zeros,
                use_acc=False, is_async=True,
            )  # fmt: skip
            distance = get(diagonals.index(stage))
            count = get(counts.index(stage))
            s = warpgroup_mma_wait(1, deps=(s,))
            s = capped(s, cap_scale) if SOFTCAP else gl.exp2(s * scale - row_lse[:, None])
            if distance != UNMASKED:
                low = query * 0
                high = gl.minimum(low + count - 1, query + right - distance)
                if HAS_LEFT:
                    low = query - left - distance
                s = seen_only(s, low, high, UNSEEN, True)
            p = gl.exp2(s * (cap * scale) - row_lse[:, None]) * (1.0 - s * s) if SOFTCAP else s
            dp = warpgroup_mma_wait(0, deps=(dp,))
            arrive(VALUES_FREE, ALL)
            ds = gl.convert_layout((p * (dp - row_delta[:, None])).to(DTYPE), PL)
            total = warpgroup_mma(ds, keys.index(stage), total, is_async=True)
            total, ds = warpgroup_mma_wait(0, deps=(total, ds))
            arrive(KEYS_FREE + stage, ALL)
            block += 1
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        arrive(QUERIES_FREE + W, CONSUMER_AND_PRODUCER)
        # worked out again, rather than held in registers meanwhile
        tile, head = work_item(turn, programs, program, num_tiles, num_heads, heads_together)
        row, num_rows, _position, _begin, _border, _end = load_tile(tile_map, tile)
        mine = row + W * QUERIES
        count = num_rows - W * QUERIES
        total = total * softmax_scale
        if ACCUMULATE:
            total += load_rows(dq, mine, count, head, stride_dqt, stride_dqh, total)
        store_rows(dq, total, mine, count, head, stride_dqt, stride_dqh, False)


@gluon.jit(do_not_specialize=VARYING)
def _grad_q_kernel(
    q, k, v, do, lse, delta, dq, tile_map,
    num_tiles, num_heads, heads_together, q_head_start, q_per_kv,
    scale, cap_scale, cap, left, right, softmax_scale,
    stride_qh, stride_kh, stride_vh, stride_doh, stride_row, stride_dqt, stride_dqh,
    BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    HAS_LEFT: gl.constexpr, SOFTCAP: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = q.dtype
    rows_layout: gl.constexpr = gl.NVMMASharedLayout(128, element_bitwidth=16, rank=2)
    queries = gl.allocate_shared_memory(DTYPE, [2, QUERIES, D], rows_layout)
    grads = gl.allocate_shared_memory(DTYPE, [2, QUERIES, D], rows_layout)
    keys = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, D], rows_layout)
    values = gl.allocate_shared_memory(DTYPE, [1, BLOCK_N, D], rows_layout)
    one: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    diagonals = gl.allocate_shared_memory(gl.int32, [STAGES, 1], one)
    counts = gl.allocate_shared_memory(gl.int32, [STAGES, 1], one)
    bl: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], bl)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bl)
    v_full = gl.allocate_shared_memory(gl.int64, [1], bl)
    mbarrier.init(v_full, count=1)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=2)  # the copy, and then where the block stands
    gl.warp_specialize(
        [
            (_consume, (
                0, lse, delta, dq, tile_map,
                queries, grads, keys, values, diagonals, counts,
                q_full, k_full, v_full,
                num_tiles, num_heads, heads_together,
                scale, cap_scale, cap, left, right, softmax_scale,
                stride_row, stride_dqt, stride_dqh,
                BLOCK_N, D, STAGES, HAS_LEFT, SOFTCAP, ACCUMULATE,
            )),
            (_consume, (
                1, lse, delta, dq, tile_map,
                queries, grads, keys, values, diagonals, counts,
                q_full, k_full, v_full,
                num_tiles, num_heads, heads_together,
                scale, cap_scale, cap, left, right, softmax_scale,
                stride_row, stride_dqt, stride_dqh,
                BLOCK_N, D, STAGES, HAS_LEFT, SOFTCAP, ACCUMULATE,
            )),
            (_produce, (
                q, k, v, do, tile_map, queries, grads, keys, values, diagonals, counts,
                q_full, k_full, v_full,
                num_tiles, num_heads, heads_together, q_head_start, q_per_kv,
                stride_qh, stride_kh, stride_vh, stride_doh, BLOCK_N, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def grad_q(inputs: BackwardInputs, tensors: Tensors, dq: torch.Tensor) -> None:
    """Write dq, [T, H, 256] in any float dtype; with `inputs.accumulate` add to it, in fp32.

    The copy engine must be able to read the tensors.
    """
    launch = _prepare(inputs)
    if launch is not None:
        launch(*tensors, dq)


@kept
def _prepare(inputs: BackwardInputs) -> Guarded | None:
    """Return the launch; None where there is nothing to do."""
    launch, device = inputs.launch, inputs.q.device
    tiles = query_tiles(
        *inputs.segments, launch.options.mask, 2 * CONFIG.block_m, CONFIG.block_n, device,
        keep_empty=not inputs.accumulate,
    )  # fmt: skip
    items = tiles.num_tiles * launch.num_heads
    if not items:
        return None
    programs = min(items, max(1, num_sms(device) - inputs.sm_margin))
    scalars = (
        tiles.num_tiles,
        launch.num_heads,
        launch.kv_heads_together(inputs.k, 2, 1) * launch.heads.q_per_kv,
        *scalars_of(inputs),
        *inputs.dq.row_strides,
    )
    constants = {"BLOCK_N": CONFIG.block_n, **constants_of(inputs, CONFIG)}
    prepared = Prepared(
        _grad_q_kernel, (programs,), scalars, constants,
        tiles=tiles, blocks=[*loaded_blocks(inputs, CONFIG), None, None, None],
    )  # fmt: skip
    return Guarded(prepared, "grad_q", inputs.q.dtype, HEAD_DIM)
