"""dK and dV for Hopper at head dimension 256, where dq, dk and dv of a tile do not fit together.

A program walks tiles of 64 keys, as in backward.py. The two consumers share all of them: one owns
dv, the other dk, 64 x 256 sums each, and either computes half of what a block needs:

    s^T = k q^T,   p^T = exp(s^T - lse),   dv += p^T do         the first
    dp^T = v do^T, ds^T = p^T (dp^T - delta), dk += ds^T q      the second

p goes from the first to the second through shared memory, and nothing else does: the first may be
a block ahead. Every sum has one owner and one order, so results repeat bit for bit.
"""

from __future__ import annotations

import torch

from hexiseq_triton.kernels.backward_inputs import BackwardInputs, Tensors
from hexiseq_triton.kernels.blocks import VARYING
from hexiseq_triton.kernels.configs import Config
from hexiseq_triton.kernels.hopper.api import (
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from hexiseq_triton.kernels.hopper.blocks import get, load_rows, store_rows
from hexiseq_triton.kernels.hopper.counters import zero_counters
from hexiseq_triton.kernels.hopper.guard import Guarded
from hexiseq_triton.kernels.hopper.key_work import (
    constants_of,
    key_work,
    loaded_blocks,
    scalars_of,
)
from hexiseq_triton.kernels.hopper.named import ALL, CONSUMERS, arrive, meet, meet_if
from hexiseq_triton.kernels.hopper.producer import (
    FIRST_KEY,
    KV_HEAD,
    NUM_BLOCKS,
    NUM_KEYS,
    QUERIES_FREE,
    WORK_FIELDS,
    produce,
    scales_early,
)
from hexiseq_triton.kernels.hopper.scores import probabilities, unpacked
from hexiseq_triton.kernels.kept import kept
from hexiseq_triton.kernels.prepared import Prepared

HEAD_DIM = 256
CONFIG = Config(64, 64, 4, 2, descriptors=True)
P_FULL = gl.constexpr(4)
"""The named barriers of p in its two places."""
P_FREE = gl.constexpr(6)


@gluon.jit
def _consume(
    OWNS_DK: gl.constexpr, grad, work,
    keys, values, queries, grads, lses, deltas, diagonals, exchanged,
    kv_full, free, q_full, do_full,
    scale, cap_scale, cap, left, right, softmax_scale, stride_t, stride_h,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    HAS_LEFT: gl.constexpr, SOFTCAP: gl.constexpr,
    ACCUMULATE: gl.constexpr,
):  # fmt: skip
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    AL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=AL, k_width=2)
    CL: gl.constexpr = gl.SliceLayout(0, SL)
    DTYPE: gl.constexpr = keys.dtype
    EARLY: gl.constexpr = scales_early(DTYPE)
    zeros = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, SL)
    stage = 0
    phase = 0
    slot = 0
    done = 0
    turn = 0
    mbarrier.wait(kv_full, 0)
    blocks = get(work.index(NUM_BLOCKS))
    while blocks >= 0:
        k_rows = get(work.index(NUM_KEYS))
        total = gl.zeros([BLOCK_N, D], gl.float32, AL)
        for i in range(blocks):
            o = i >> 30  # 0, which the compiler must not know
            if OWNS_DK:
                mbarrier.wait(do_full.index(stage), phase)
                dp = warpgroup_mma(
                    values.index(o), grads.index(stage).permute((1, 0)), zeros,
                    use_acc=False, is_async=True,
                )  # fmt: skip
                mbarrier.wait(q_full.index(stage), phase)
                row_delta = deltas.index(stage).load(CL)[None, :]
                meet(P_FULL + slot, CONSUMERS)
                weight = exchanged.index(slot).load(SL)
                dp = warpgroup_mma_wait(0, deps=(dp,))
                dp = dp * softmax_scale - row_delta if EARLY else dp - row_delta
                ds = gl.convert_layout((unpacked(weight) * dp).to(DTYPE), PL)
                arrive(P_FREE + slot, CONSUMERS)
                total = warpgroup_mma(ds, queries.index(stage), total, is_async=True)
                total, ds = warpgroup_mma_wait(0, deps=(total, ds))
            else:
                mbarrier.wait(q_full.index(stage), phase)
                s = warpgroup_mma(
                    keys.index(o), queries.index(stage).permute((1, 0)), zeros,
                    use_acc=False, is_async=True,
                )  # fmt: skip
                row_lse = lses.index(stage).load(CL)
                diagonal = get(diagonals.index(stage))
                meet_if(done >= 2, P_FREE + slot, CONSUMERS)
                mbarrier.wait(do_full.index(stage), phase)
                s = warpgroup_mma_wait(0, deps=(s,))
                p, weight = probabilities(
                    s, row_lse, diagonal, 0, k_rows,
                    scale, cap_scale, cap, left, right, DTYPE, HAS_LEFT, SOFTCAP,
                )  # fmt: skip
                exchanged.index(slot).store(weight)
                arrive(P_FULL + slot, CONSUMERS)
                p = gl.convert_layout(p, PL)
                total = warpgroup_mma(p, grads.index(stage), total, is_async=True)
                total, p = warpgroup_mma_wait(0, deps=(total, p))
            arrive(QUERIES_FREE + stage, ALL)
            done += 1
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
            slot ^= 1
        # read now, rather than held in registers meanwhile
        kv_head = get(work.index(KV_HEAD))
        row = get(work.index(FIRST_KEY))
        num_rows = get(work.index(NUM_KEYS))
        mbarrier.arrive(free, count=1)
        if OWNS_DK and not EARLY:
            total = total * softmax_scale
        if ACCUMULATE:
            total += load_rows(grad, row, num_rows, kv_head, stride_t, stride_h, total)
        store_rows(grad, total, row, num_rows, kv_head, stride_t, stride_h, True)
        turn += 1
        mbarrier.wait(kv_full, turn & 1)
        blocks = get(work.index(NUM_BLOCKS))


@gluon.jit(do_not_specialize=[*VARYING, "num_items"])
def _grad_kv_kernel(
    q, k, v, do, lse, delta, dk, dv, items, counter, tile_map,
    num_items, num_tiles, num_heads, q_head_start, q_per_kv,
    scale, cap_scale, cap, left, right, softmax_scale,
    stride_qh, stride_kh, stride_vh, stride_doh, stride_row,
    stride_dkt, stride_dkh, stride_dvt, stride_dvh,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    HAS_LEFT: gl.constexpr, SOFTCAP: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = q.dtype
    rows_layout: gl.constexpr = gl.NVMMASharedLayout(128, element_bitwidth=16, rank=2)
    keys = gl.allocate_shared_memory(DTYPE, [1, BLOCK_N, D], rows_layout)
    values = gl.allocate_shared_memory(DTYPE, [1, BLOCK_N, D], rows_layout)
    queries = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_M, D], rows_layout)
    grads = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_M, D], rows_layout)
    exchanged = gl.allocate_shared_memory(DTYPE, [2, BLOCK_N, BLOCK_M], rows_layout)
    one: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    work = gl.allocate_shared_memory(gl.int32, [WORK_FIELDS, 1], one)
    counts = gl.allocate_shared_memory(gl.int32, [STAGES + 1, 1], one)
    places = gl.allocate_shared_memory(gl.int32, [STAGES + 1, 1], one)
    columns = gl.allocate_shared_memory(gl.int32, [STAGES + 1, 1], one)
    diagonals = gl.allocate_shared_memory(gl.int32, [STAGES, 1], one)
    lses = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], one)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], one)
    bl: gl.constexpr = mbarrier.MBarrierLayout()
    kv_full = gl.allocate_shared_memory(gl.int64, [1], bl)
    k_free = gl.allocate_shared_memory(gl.int64, [1], bl)
    v_free = gl.allocate_shared_memory(gl.int64, [1], bl)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bl)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bl)
    mbarrier.init(kv_full, count=2)  # the copy, and then the work item
    mbarrier.init(k_free, count=1)  # given back by the owner of dV
    mbarrier.init(v_free, count=1)  # and of dK
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=2)  # the copy, and then lse and delta
        mbarrier.init(do_full.index(i), count=1)
    gl.warp_specialize(
        [
            (_consume, (
                False, dv, work,
                keys, values, queries, grads, lses, deltas, diagonals, exchanged,
                kv_full, k_free, q_full, do_full,
                scale, cap_scale, cap, left, right, softmax_scale, stride_dvt, stride_dvh,
                BLOCK_M, BLOCK_N, D, STAGES, HAS_LEFT, SOFTCAP, ACCUMULATE,
            )),
            (_consume, (
                True, dk, work,
                keys, values, queries, grads, lses, deltas, diagonals, exchanged,
                kv_full, v_free, q_full, do_full,
                scale, cap_scale, cap, left, right, softmax_scale, stride_dkt, stride_dkh,
                BLOCK_M, BLOCK_N, D, STAGES, HAS_LEFT, SOFTCAP, ACCUMULATE,
            )),
            (produce, (
                q, k, v, do, lse, delta, items, counter, tile_map, work,
                keys, values, queries, grads, lses, deltas, places, counts, columns, diagonals,
                kv_full, k_free, v_free, q_full, do_full,
                num_items, num_tiles, num_heads, q_head_start, q_per_kv,
                softmax_scale, stride_qh, stride_kh, stride_vh, stride_doh, stride_row, 0,
                BLOCK_M, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def grad_kv(inputs: BackwardInputs, tensors: Tensors, dk: torch.Tensor, dv: torch.Tensor) -> None:
    """Write dk and dv, [T_kv, H_kv, 256] in any float dtype; with `inputs.accumulate` add in fp32.

    The copy engine must be able to read the tensors.
    """
    prepared = _prepare(inputs)
    if prepared is not None:
        launch, items = prepared
        counter = zero_counters(dk.device)  # one is needed
        launch(*tensors, dk, dv, items, counter)


@kept
def _prepare(inputs: BackwardInputs) -> tuple[Guarded, torch.Tensor] | None:
    """Return the launch and its work items; None where there is nothing to do."""
    work = key_work(inputs, CONFIG)
    if work is None:
        return None
    scalars = (
        work.num_items,
        work.tiles.num_tiles,
        inputs.launch.num_heads,
        *scalars_of(inputs),
        *inputs.dk.row_strides,
        *inputs.dv.row_strides,
    )
    constants = {
        "BLOCK_M": CONFIG.block_m,
        "BLOCK_N": CONFIG.block_n,
        **constants_of(inputs, CONFIG),
    }
    prepared = Prepared(
        _grad_kv_kernel, (work.num_programs,), scalars, constants,
        tiles=work.tiles, blocks=[*loaded_blocks(inputs, CONFIG), *[None] * 6],
    )  # fmt: skip
    return Guarded(prepared, "grad_kv", inputs.q.dtype, HEAD_DIM), work.items
