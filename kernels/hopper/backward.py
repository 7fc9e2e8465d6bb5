"""Fused attention backward for Hopper: dQ, dK and dV in one warp-specialised kernel, or dK and dV.

A program walks key tiles. Two consumers own 64 keys each and see the same blocks of queries, 64 of
them at head dimension 128 and 128 at 64, of all query heads that share the KV head; a producer warp
loads the blocks. Per block, in transposed form, so that p and ds are operands straight from
registers:

    s^T = k q^T,  p^T = exp(s^T - lse),  dp^T = v do^T,  ds^T = p^T (dp^T - delta)
    dv += p^T do,  dk += ds^T q          by the owner of the keys
    dq^T = k^T ds^T                      half of it by either consumer

The halves of dq are added to memory by the copy engine. Without dq (`grad_kv`, for the split form)
every sum has one order.

A program takes the next tile of the order in order.py when it is done with one, and walks its
queries in the direction that this order says, so that q, do and dq stay in the L2 cache.
"""

from __future__ import annotations

import torch

from hexiseq_triton.kernels.backward_inputs import BackwardInputs, Tensors
from hexiseq_triton.kernels.blocks import VARYING
from hexiseq_triton.kernels.configs import Config
from hexiseq_triton.kernels.forms import Form, bounded_blocks, form
from hexiseq_triton.kernels.hopper import grad_kv as wide
from hexiseq_triton.kernels.hopper.api import gl, gluon, mbarrier, partition_barrier, with_layout
from hexiseq_triton.kernels.hopper.counters import zero_counters
from hexiseq_triton.kernels.hopper.fused_consumer import COLUMNS, KEYS, consume
from hexiseq_triton.kernels.hopper.guard import Guarded
from hexiseq_triton.kernels.hopper.key_work import (
    constants_of,
    key_work,
    loaded_blocks,
    scalars_of,
)
from hexiseq_triton.kernels.hopper.producer import WORK_FIELDS, produce
from hexiseq_triton.kernels.kept import kept
from hexiseq_triton.kernels.prepared import Prepared


@gluon.jit(do_not_specialize=[*VARYING, "num_items"])
def _backward_kernel(
    q, k, v, do, lse, delta, dq, dk, dv, items, counter, tile_map,
    num_items, num_tiles, num_heads, q_head_start, q_per_kv,
    scale, cap_scale, cap, left, right, softmax_scale,
    stride_qh, stride_kh, stride_vh, stride_doh, stride_row,
    stride_dqh, stride_dkt, stride_dkh, stride_dvt, stride_dvh,
    BLOCK_M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    HAS_LEFT: gl.constexpr, SOFTCAP: gl.constexpr,
    FUSED: gl.constexpr, ACCUMULATE: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = q.dtype
    rows_layout: gl.constexpr = gl.NVMMASharedLayout(128, element_bitwidth=16, rank=2)
    sums_layout: gl.constexpr = gl.NVMMASharedLayout(128, element_bitwidth=32, rank=2)
    keys = gl.allocate_shared_memory(DTYPE, [1, 2 * KEYS, D], rows_layout)
    values = gl.allocate_shared_memory(DTYPE, [1, 2 * KEYS, D], rows_layout)
    queries = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_M, D], rows_layout)
    grads = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_M, D], rows_layout)
    one: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    work = gl.allocate_shared_memory(gl.int32, [WORK_FIELDS, 1], one)
    counts = gl.allocate_shared_memory(gl.int32, [STAGES + 1, 1], one)
    places = gl.allocate_shared_memory(gl.int32, [STAGES + 1, 1], one)
    columns = gl.allocate_shared_memory(gl.int32, [STAGES + 1, 1], one)
    diagonals = gl.allocate_shared_memory(gl.int32, [STAGES, 1], one)
    lses = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], one)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], one)
    QUERIES: gl.constexpr = BLOCK_M if D > COLUMNS else BLOCK_M // 2
    # the queries of a consumer are whole bands of the swizzle
    halves: gl.constexpr = gl.NVMMASharedLayout(2 * QUERIES, element_bitwidth=16, rank=2)
    exchanged = gl.allocate_shared_memory(DTYPE, [STAGES + 1, 2 * KEYS, BLOCK_M], halves)
    staged = gl.allocate_shared_memory(gl.float32, [2, QUERIES, COLUMNS], sums_layout)
    bl: gl.constexpr = mbarrier.MBarrierLayout()
    kv_full = gl.allocate_shared_memory(gl.int64, [1], bl)
    k_free = gl.allocate_shared_memory(gl.int64, [1], bl)
    v_free = gl.allocate_shared_memory(gl.int64, [1], bl)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bl)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bl)
    # where a program's first block adds the product that nobody reads: anywhere in dq
    nowhere = gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    places.index(STAGES).store(nowhere)
    columns.index(STAGES).store(nowhere)
    mbarrier.init(kv_full, count=2)  # the copy, and then the work item
    mbarrier.init(k_free, count=2)
    mbarrier.init(v_free, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=2)  # the copy, and then lse and delta
        mbarrier.init(do_full.index(i), count=1)
    partition_barrier()  # here, or the compiler puts one into the first consumer's loop
    gl.warp_specialize(
        [
            (consume, (
                0, dk, dv, dq, work,
                keys, values, queries, grads, lses, deltas, places, counts, columns, diagonals,
                exchanged, staged,
                kv_full, k_free, v_free, q_full, do_full,
                scale, cap_scale, cap, left, right, softmax_scale,
                stride_dkt, stride_dkh, stride_dvt, stride_dvh,
                BLOCK_M, D, STAGES, HAS_LEFT, SOFTCAP, FUSED, ACCUMULATE,
            )),
            (consume, (
                1, dk, dv, dq, work,
                keys, values, queries, grads, lses, deltas, places, counts, columns, diagonals,
                exchanged, staged,
                kv_full, k_free, v_free, q_full, do_full,
                scale, cap_scale, cap, left, right, softmax_scale,
                stride_dkt, stride_dkh, stride_dvt, stride_dvh,
                BLOCK_M, D, STAGES, HAS_LEFT, SOFTCAP, FUSED, ACCUMULATE,
            )),
            (produce, (
                q, k, v, do, lse, delta, items, counter, tile_map, work,
                keys, values, queries, grads, lses, deltas, places, counts, columns, diagonals,
                kv_full, k_free, v_free, q_full, do_full,
                num_items, num_tiles, num_heads, q_head_start, q_per_kv,
                softmax_scale, stride_qh, stride_kh, stride_vh, stride_doh, stride_row, stride_dqh,
                BLOCK_M, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


CONFIGS = {
    64: Config(128, 2 * KEYS.value, 4, 2, descriptors=True),
    128: Config(64, 2 * KEYS.value, 4, 2, descriptors=True),
}
"""By head dimension."""


def queries_of(head_dim: int) -> int:
    """Return of how many queries of a block a consumer computes dq."""
    block_m = CONFIGS[head_dim].block_m
    return block_m if head_dim > COLUMNS.value else block_m // 2


def takes(inputs: BackwardInputs, dq: torch.Tensor | None) -> bool:
    """Return whether the copy engine can read these tensors, and add to dq if given."""
    added = dq is None or dq.dtype != torch.float32 or inputs.launch.fits_descriptors(form(dq))
    return inputs.uses_descriptors(CONFIGS[128]) and added


def grad_fused(
    inputs: BackwardInputs,
    tensors: Tensors,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    """Write dq, dk and dv in any float dtype; with `inputs.accumulate` add to them, in fp32.

    dq of a lower dtype is summed in fp32 scratch memory, and rounded once.
    """
    total = dq
    if not inputs.accumulate:
        total = (
            dq.zero_() if dq.dtype == torch.float32 else torch.zeros_like(dq, dtype=torch.float32)
        )
    _launch(inputs, tensors, total, dk, dv)
    if total is not dq:
        dq.copy_(total)


def grad_kv(inputs: BackwardInputs, tensors: Tensors, dk: torch.Tensor, dv: torch.Tensor) -> None:
    """Write dk and dv in any float dtype; with `inputs.accumulate` add to them, in fp32.

    Every sum has one order: results repeat bit for bit.
    """
    if tensors[0].shape[2] == wide.HEAD_DIM:
        wide.grad_kv(inputs, tensors, dk, dv)
    else:
        _launch(inputs, tensors, None, dk, dv)


def _launch(
    inputs: BackwardInputs,
    tensors: Tensors,
    dq: torch.Tensor | None,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    """Write dk and dv, or add to them; add to dq if given."""
    prepared = _prepare(inputs, None if dq is None else form(dq))
    if prepared is not None:
        launch, items = prepared
        counter = zero_counters(dk.device)  # one is needed
        launch(*tensors, tensors[0] if dq is None else dq, dk, dv, items, counter)


@kept
def _prepare(inputs: BackwardInputs, dq: Form | None) -> tuple[Guarded, torch.Tensor] | None:
    """Return the launch and the order of its work items; None where there is nothing to do."""
    launch = inputs.launch
    config = CONFIGS[launch.head_dim]
    work = key_work(inputs, config)
    if work is None:
        return None
    scalars = (
        work.num_items,
        work.tiles.num_tiles,
        launch.num_heads,
        *scalars_of(inputs),
        0 if dq is None else dq.row_strides[1],
        *inputs.dk.row_strides,
        *inputs.dv.row_strides,
    )
    constants = {
        "BLOCK_M": config.block_m,
        "FUSED": dq is not None,
        **constants_of(inputs, config),
    }
    added = None
    if dq is not None:
        cut = bounded_blocks(dq, queries_of(launch.head_dim))
        cut = cut._replace(block_shape=[*cut.block_shape[:3], COLUMNS.value])
        added = with_layout(cut, dq.dtype)
    prepared = Prepared(
        _backward_kernel, (work.num_programs,), scalars, constants,
        tiles=work.tiles,
        blocks=[*loaded_blocks(inputs, config), None, None, added, *[None] * 4],
    )  # fmt: skip
    direction = "grad_kv" if dq is None else "backward"
    return Guarded(prepared, direction, inputs.q.dtype, launch.head_dim), work.items
