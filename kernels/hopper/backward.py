"""Fused attention backward for Hopper: dQ, dK and dV in one warp-specialised kernel.

A program walks key tiles. Two consumers own 64 keys each and see the same blocks of 64 queries, of
all query heads that share the KV head; a producer warp loads the blocks. Per block, in transposed
form, so that p and ds are operands straight from registers:

    s^T = k q^T,  p^T = exp(s^T - lse),  dp^T = v do^T,  ds^T = p^T (dp^T - delta)
    dv += p^T do,  dk += ds^T q          by the owner of the keys
    dq^T = k^T ds^T                      64 columns by either consumer

At head dimension 128 each consumer needs the ds of the other for its half of dq: they meet in
shared memory. At 64 each adds what its own keys give. dq of a block is computed one block late, so
that nobody waits and the tensor cores work while ds is formed. The copy engine adds it to memory,
in float32, in any order: results differ in their last bits from run to run, the reason why
`deterministic` takes the portable kernels.

A program takes the next tile of the order in order.py when it is done with one, and walks its
tiles from the last query to the first and back in turn. In a causal document all programs are then
near the same queries at any time, and q, do and dq stay in the L2 cache.

docs/hopper-kernels.md explains the lines marked "for the compiler".
"""

from __future__ import annotations

from functools import lru_cache

import torch

from hexiseq_triton.kernels.backward_inputs import BackwardInputs, Tensors
from hexiseq_triton.kernels.blocks import VARYING
from hexiseq_triton.kernels.configs import Config, num_sms
from hexiseq_triton.kernels.forms import Form, bounded_blocks, form
from hexiseq_triton.kernels.hopper.api import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma,
    tma_add,
    warpgroup_mma,
    warpgroup_mma_wait,
    with_layout,
)
from hexiseq_triton.kernels.hopper.blocks import (
    LOG2E,
    bounded_at,
    by_thread,
    copy_rows,
    four_dimensional,
    load_rows,
    load_span,
    load_tile,
    store_rows,
    thread_columns,
)
from hexiseq_triton.kernels.hopper.guard import Guarded
from hexiseq_triton.kernels.hopper.order import work_order
from hexiseq_triton.kernels.prepared import MOST_PREPARED, Prepared
from hexiseq_triton.kernels.tilemap import build_map, key_tiles
from hexiseq_triton.segments import Mask

KEYS = gl.constexpr(64)  # keys of a consumer
COLUMNS = gl.constexpr(64)  # columns of dq that a consumer computes
UNMASKED = gl.constexpr(1 << 30)  # in place of a distance
_FAR = gl.constexpr(1 << 30)


@gluon.constexpr_function
def _scales_early(dtype):
    """Return whether ds has the softmax scale, which is free there; in fp16 it could underflow."""
    return dtype == gl.bfloat16


@gluon.jit
def _put(place, number):
    """Store a number in shared memory, by a warp."""
    place.store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def _get(place):
    """Return a number from shared memory, in each thread of a warpgroup."""
    return gl.sum(place.load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _heads_of(kv_head, num_heads, q_head_start, q_per_kv):
    """Return the first of the query heads that read `kv_head`, of those here, and their number."""
    group = q_head_start // q_per_kv + kv_head
    begin = gl.maximum(group * q_per_kv - q_head_start, 0)
    end = gl.minimum((group + 1) * q_per_kv - q_head_start, num_heads)
    return begin, end - begin


@gluon.jit
def _num_blocks(tile_map, num_tiles, full_begin, edge_end, BLOCK_M: gl.constexpr):
    """Return how many blocks of queries the spans of a tile hold."""
    count = 0
    for span in range(full_begin, edge_end):
        _row, rows, _position = load_span(tile_map, num_tiles, span)
        count += gl.cdiv(rows, BLOCK_M)
    return count


@gluon.jit
def _span_in_turn(
    tile_map, num_tiles, full_begin, edge_begin, edge_end, number, ahead, BLOCK_M: gl.constexpr
):
    """Return row, rows and position of span `number` in the order of the walk, its first block's
    offset, and whether it is an edge. `ahead`: edges, then full spans; else all in reverse."""
    edges = edge_end - edge_begin
    count = edge_end - full_begin
    place = gl.where(ahead, number, count - 1 - number)
    is_edge = place < edges
    span = gl.where(is_edge, edge_begin + place, full_begin + place - edges)
    row, rows, position = load_span(tile_map, num_tiles, gl.minimum(span, edge_end - 1))
    offset = gl.where(ahead, 0, (rows - 1) // BLOCK_M * BLOCK_M)
    return row, rows, position, offset, is_edge


@gluon.jit
def _produce(
    q, k, v, do, lse, delta, items, counter, tile_map, work,
    keys, values, queries, grads, lses, deltas, places, counts, columns, diagonals,
    kv_full, kv_free, q_full, do_full, q_free,
    num_items, num_tiles, num_heads, q_head_start, q_per_kv, softmax_scale,
    stride_qh, stride_kh, stride_vh, stride_doh, stride_row, stride_dqh,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    L: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    offsets = gl.arange(0, BLOCK_M, L)
    stage = 0
    phase = 1
    turn = 0
    item = gl.atomic_add(counter, 1, sem="relaxed")
    while item < num_items:
        tile = gl.load(items + 2 * item)
        kv_head = gl.load(items + 2 * item + 1)
        k_row, k_rows, k_position, full_begin, edge_begin, edge_end = load_tile(tile_map, tile)
        head_begin, group = _heads_of(kv_head, num_heads, q_head_start, q_per_kv)
        mbarrier.wait(kv_free, (turn & 1) ^ 1)
        mbarrier.expect(kv_full, k.block_type.nbytes + v.block_type.nbytes)
        copy_rows(k, k_row, k_rows, kv_head * stride_kh, kv_full, keys.index(0))
        copy_rows(v, k_row, k_rows, kv_head * stride_vh, kv_full, values.index(0))
        _put(work.index(0), tile)
        _put(work.index(1), kv_head)
        mbarrier.arrive(kv_full, count=1)
        ahead = turn % 2 == 1
        for number in range(edge_end - full_begin):
            row, rows, position, offset, is_edge = _span_in_turn(
                tile_map, num_tiles, full_begin, edge_begin, edge_end, number, ahead, BLOCK_M
            )
            for _block in range(gl.cdiv(rows, BLOCK_M)):
                inside = offsets < rows - offset
                masked = is_edge | (k_rows < 2 * KEYS)
                diagonal = gl.where(masked, k_position - position - offset, UNMASKED)
                for head in range(head_begin, head_begin + group):
                    row_at = head * stride_row + row + offset + offsets
                    row_lse = gl.load(lse + row_at, mask=inside, other=float("-inf"))
                    row_delta = gl.load(delta + row_at, mask=inside, other=0.0)
                    # p is 0 in rows that do not exist and in those that saw no key
                    row_lse = gl.where(row_lse == float("-inf"), float("inf"), row_lse * LOG2E)
                    mbarrier.wait(q_free.index(stage), phase)
                    mbarrier.expect(q_full.index(stage), q.block_type.nbytes)
                    copy_rows(
                        q, row + offset, rows - offset, head * stride_qh,
                        q_full.index(stage), queries.index(stage),
                    )  # fmt: skip
                    mbarrier.expect(do_full.index(stage), do.block_type.nbytes)
                    copy_rows(
                        do, row + offset, rows - offset, head * stride_doh,
                        do_full.index(stage), grads.index(stage),
                    )  # fmt: skip
                    lses.index(stage).store(row_lse)
                    deltas.index(stage).store(
                        row_delta * softmax_scale if _scales_early(q.dtype) else row_delta
                    )
                    _put(places.index(stage), row + offset)
                    _put(counts.index(stage), rows - offset)
                    _put(columns.index(stage), head * stride_dqh)
                    _put(diagonals.index(stage), diagonal)
                    mbarrier.arrive(q_full.index(stage), count=1)
                    stage += 1
                    if stage == STAGES:
                        stage = 0
                        phase ^= 1
                offset += gl.where(ahead, BLOCK_M, -BLOCK_M)
        turn += 1
        item = gl.atomic_add(counter, 1, sem="relaxed")
    mbarrier.wait(kv_free, (turn & 1) ^ 1)
    _put(work.index(0), -1)
    mbarrier.arrive(kv_full, count=2)


@gluon.jit
def _seen(p, low, high, HAS_LEFT: gl.constexpr):
    """Return p^T [KEYS, BLOCK_M], 0 but where the query's index in the block is in [low, high]."""
    x = by_thread(p)
    XL: gl.constexpr = x.type.layout
    RL: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, XL)))
    known, lane = thread_columns(p.shape[1], XL)
    first = gl.convert_layout(low, RL, assert_trivial=True)[:, None, None, None]
    seen = known >= first - lane
    if HAS_LEFT:
        last = gl.convert_layout(high, RL, assert_trivial=True)[:, None, None, None]
        seen = seen & (known <= last - lane)
    x = gl.where(seen, x, 0.0)
    return gl.convert_layout(x.reshape(p.shape), p.type.layout, assert_trivial=True)


@gluon.jit
def _grad_q(W: gl.constexpr, keys, ds, zeros):
    """Issue this consumer's part of dq^T = k^T ds^T: of its columns, or from its keys."""
    D: gl.constexpr = keys.shape[1]
    if D == COLUMNS:
        k_part = keys.slice(W * KEYS, KEYS, 0)
        ds_part = ds.slice(W * KEYS, KEYS, 0)
    else:
        k_part = keys.slice(W * COLUMNS, COLUMNS, 1)
        ds_part = ds
    return warpgroup_mma(k_part.permute((1, 0)), ds_part, zeros, use_acc=False, is_async=True)


@gluon.jit
def _add_grad_q(dq_rows, dq, staged, row, num_rows, column, softmax_scale, EARLY: gl.constexpr):
    """Let the copy engine add dq^T [COLUMNS, BLOCK_M] to `num_rows` rows in memory, once its last
    addition has read what it adds."""
    if not EARLY:
        dq = dq * softmax_scale
    tma.store_wait(0)
    staged.permute((1, 0)).store(dq)
    fence_async_shared()
    tma_add(dq_rows, bounded_at(dq_rows, row, num_rows, column), four_dimensional(staged, dq_rows))


@gluon.jit
def _consume(
    W: gl.constexpr, dk, dv, dq_rows, tile_map, work,
    keys, values, queries, grads, lses, deltas, places, counts, columns, diagonals,
    exchanged, staged_all,
    kv_full, kv_free, q_full, do_full, q_free, ds_full,
    num_tiles, num_heads, q_head_start, q_per_kv, scale, left, right, softmax_scale,
    stride_dkt, stride_dkh, stride_dvt, stride_dvh,
    BLOCK_M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    AL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=AL, k_width=2)
    CL: gl.constexpr = gl.SliceLayout(0, SL)
    RL: gl.constexpr = gl.SliceLayout(1, SL)
    DTYPE: gl.constexpr = keys.dtype
    FIRST_COLUMN: gl.constexpr = 0 if D == COLUMNS else W * COLUMNS
    EARLY: gl.constexpr = _scales_early(DTYPE)
    staged = staged_all.index(W)
    zeros = gl.zeros([KEYS, BLOCK_M], gl.float32, SL)
    stage = 0
    phase = 0
    slot = 0  # where this block's ds is exchanged, and its parity ...
    slot_phase = 0
    old_slot = 2  # ... and the same of the block before
    old_phase = 1
    turn = 0
    mbarrier.wait(kv_full, 0)
    tile = _get(work.index(0))
    while tile >= 0:
        kv_head = _get(work.index(1))
        k_row, k_rows, _position, full_begin, _border, edge_end = load_tile(tile_map, tile)
        _head, group = _heads_of(kv_head, num_heads, q_head_start, q_per_kv)
        num_blocks = _num_blocks(tile_map, num_tiles, full_begin, edge_end, BLOCK_M) * group
        dk_block = gl.zeros([KEYS, D], gl.float32, AL)
        dv_block = gl.zeros([KEYS, D], gl.float32, AL)
        old_place = 0
        old_count = 0
        old_column = 0
        for i in range(num_blocks):
            # 0, which the compiler must not know: it would keep 24 descriptors in registers
            o = i >> 30
            k_mine = keys.index(o).slice(W * KEYS, KEYS, 0)
            v_mine = values.index(o).slice(W * KEYS, KEYS, 0)
            mbarrier.wait(q_full.index(stage), phase)
            s = warpgroup_mma(
                k_mine, queries.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            mbarrier.wait(do_full.index(stage), phase)
            dp = warpgroup_mma(
                v_mine, grads.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            s = warpgroup_mma_wait(1, deps=(s,))
            p = gl.exp2(s * scale - lses.index(stage).load(CL)[None, :])
            diagonal = _get(diagonals.index(stage))
            if diagonal != UNMASKED:
                key = W * KEYS + gl.arange(0, KEYS, RL)
                low = key * 0
                high = low + BLOCK_M
                if HAS_RIGHT:
                    low = diagonal + key - right
                if HAS_LEFT:
                    high = diagonal + key + left
                p = _seen(p, gl.where(key < k_rows, low, _FAR), high, HAS_LEFT)
            place = _get(places.index(stage))
            count = _get(counts.index(stage))
            column = _get(columns.index(stage)) + FIRST_COLUMN
            p16 = p.to(DTYPE)
            pb = gl.convert_layout(p16, PL)
            # dq of the block before; for a tile's first block a product that nobody reads
            mbarrier.wait(ds_full.index(old_slot), old_phase)
            dq = _grad_q(W, keys.index(o), exchanged.index(old_slot), zeros)
            dv_next = warpgroup_mma(pb, grads.index(stage), dv_block, is_async=True)
            dp = warpgroup_mma_wait(2, deps=(dp,))
            # p again from 16 bits: in float32 it would take 16 more registers
            row_delta = deltas.index(stage).load(CL)[None, :]
            dp = dp * softmax_scale - row_delta if EARLY else dp - row_delta
            ds = (_unpacked(p16) * dp).to(DTYPE)
            exchanged.index(slot).slice(W * KEYS, KEYS, 0).store(ds)
            fence_async_shared()
            mbarrier.arrive(ds_full.index(slot), count=1)
            ds = gl.convert_layout(ds, PL)
            dk_next = warpgroup_mma(ds, queries.index(stage), dk_block, is_async=True)
            dq = warpgroup_mma_wait(2, deps=(dq,))
            if i > 0:
                _add_grad_q(
                    dq_rows, dq, staged, old_place, old_count, old_column, softmax_scale, EARLY
                )
            dk_block, dv_block, pb, ds = warpgroup_mma_wait(0, deps=(dk_next, dv_next, pb, ds))
            mbarrier.arrive(q_free.index(stage), count=1)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
            old_slot = slot
            old_phase = slot_phase
            slot += 1
            if slot == 3:
                slot = 0
                slot_phase ^= 1
            old_place = place
            old_count = count
            old_column = column
        if num_blocks > 0:
            mbarrier.wait(ds_full.index(old_slot), old_phase)
            dq = _grad_q(W, keys.index(0), exchanged.index(old_slot), zeros)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            _add_grad_q(dq_rows, dq, staged, old_place, old_count, old_column, softmax_scale, EARLY)
        # read again, rather than held in registers meanwhile
        kv_head = _get(work.index(1))
        k_row, k_rows, _position, full_begin, _border, edge_end = load_tile(
            tile_map, _get(work.index(0))
        )
        mbarrier.arrive(kv_free, count=1)
        mine = k_row + W * KEYS
        count = k_rows - W * KEYS
        if not EARLY:
            dk_block = dk_block * softmax_scale
        if ACCUMULATE:
            dk_block += load_rows(dk, mine, count, kv_head, stride_dkt, stride_dkh, dk_block)
            dv_block += load_rows(dv, mine, count, kv_head, stride_dvt, stride_dvh, dv_block)
        store_rows(dv, dv_block, mine, count, kv_head, stride_dvt, stride_dvh)
        store_rows(dk, dk_block, mine, count, kv_head, stride_dkt, stride_dkh)
        turn += 1
        mbarrier.wait(kv_full, turn & 1)
        tile = _get(work.index(0))
    tma.store_wait(0)


@gluon.jit
def _unpacked(x):
    """Return x in float32, from two values in a register without a conversion that keeps more."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x],
            dtype=gl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            "{.reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b;}",
            "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2,
        )  # fmt: skip


@gluon.jit(do_not_specialize=[*VARYING, "num_items"])
def _backward_kernel(
    q, k, v, do, lse, delta, dq, dk, dv, items, counter, tile_map,
    num_items, num_tiles, num_heads, q_head_start, q_per_kv,
    scale, left, right, softmax_scale,
    stride_qh, stride_kh, stride_vh, stride_doh, stride_row,
    stride_dqh, stride_dkt, stride_dkh, stride_dvt, stride_dvh,
    BLOCK_M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, ACCUMULATE: gl.constexpr,
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
    work = gl.allocate_shared_memory(gl.int32, [2, 1], one)
    counts = gl.allocate_shared_memory(gl.int32, [STAGES, 1], one)
    places = gl.allocate_shared_memory(gl.int32, [STAGES, 1], one)
    columns = gl.allocate_shared_memory(gl.int32, [STAGES, 1], one)
    diagonals = gl.allocate_shared_memory(gl.int32, [STAGES, 1], one)
    lses = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], one)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], one)
    exchanged = gl.allocate_shared_memory(DTYPE, [3, 2 * KEYS, BLOCK_M], rows_layout)
    staged = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M, COLUMNS], sums_layout)
    bl: gl.constexpr = mbarrier.MBarrierLayout()
    kv_full = gl.allocate_shared_memory(gl.int64, [1], bl)
    kv_free = gl.allocate_shared_memory(gl.int64, [1], bl)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bl)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bl)
    q_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bl)
    ds_full = gl.allocate_shared_memory(gl.int64, [3, 1], bl)
    mbarrier.init(kv_full, count=2)  # the copy, and then the work item
    mbarrier.init(kv_free, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=2)  # the copy, and then lse and delta
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(q_free.index(i), count=2)
    for i in gl.static_range(3):
        mbarrier.init(ds_full.index(i), count=2)
    gl.warp_specialize(
        [
            (_consume, (
                0, dk, dv, dq, tile_map, work,
                keys, values, queries, grads, lses, deltas, places, counts, columns, diagonals,
                exchanged, staged,
                kv_full, kv_free, q_full, do_full, q_free, ds_full,
                num_tiles, num_heads, q_head_start, q_per_kv, scale, left, right, softmax_scale,
                stride_dkt, stride_dkh, stride_dvt, stride_dvh,
                BLOCK_M, D, STAGES, HAS_LEFT, HAS_RIGHT, ACCUMULATE,
            )),
            (_consume, (
                1, dk, dv, dq, tile_map, work,
                keys, values, queries, grads, lses, deltas, places, counts, columns, diagonals,
                exchanged, staged,
                kv_full, kv_free, q_full, do_full, q_free, ds_full,
                num_tiles, num_heads, q_head_start, q_per_kv, scale, left, right, softmax_scale,
                stride_dkt, stride_dkh, stride_dvt, stride_dvh,
                BLOCK_M, D, STAGES, HAS_LEFT, HAS_RIGHT, ACCUMULATE,
            )),
            (_produce, (
                q, k, v, do, lse, delta, items, counter, tile_map, work,
                keys, values, queries, grads, lses, deltas, places, counts, columns, diagonals,
                kv_full, kv_free, q_full, do_full, q_free,
                num_items, num_tiles, num_heads, q_head_start, q_per_kv,
                softmax_scale, stride_qh, stride_kh, stride_vh, stride_doh, stride_row, stride_dqh,
                BLOCK_M, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


CONFIG = Config(64, 2 * KEYS.value, 4, 2, descriptors=True)


def takes(inputs: BackwardInputs, dq: torch.Tensor) -> bool:
    """Return whether the kernel does this call: no softcap, and strides for the copy engine."""
    added = dq.dtype != torch.float32 or inputs.launch.fits_descriptors(form(dq))
    return inputs.launch.options.softcap == 0.0 and inputs.uses_descriptors(CONFIG) and added


def grad_fused(
    inputs: BackwardInputs,
    tensors: Tensors,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    """Do what kernels/backward_fused.py's `grad_fused` does, on inputs that `guard` takes."""
    total = dq
    if not inputs.accumulate:
        total = (
            dq.zero_() if dq.dtype == torch.float32 else torch.zeros_like(dq, dtype=torch.float32)
        )
    prepared = _prepare(inputs, form(total))
    if prepared is not None:
        launch, items = prepared
        counter = torch.zeros(1, dtype=torch.int32, device=total.device)
        launch(*tensors, total, dk, dv, items, counter)
    if total is not dq:
        dq.copy_(total)


@lru_cache(maxsize=MOST_PREPARED)
def _prepare(inputs: BackwardInputs, dq: Form) -> tuple[Guarded, torch.Tensor] | None:
    """Return the launch and the order of its work items; None where there is nothing to do."""
    launch, device = inputs.launch, inputs.q.device
    mask, keep_empty = launch.options.mask, not inputs.accumulate
    blocks = CONFIG.block_m, CONFIG.block_n
    tiles = key_tiles(*inputs.segments, mask, *blocks, device, keep_empty=keep_empty)
    num_items = tiles.num_tiles * launch.num_kv_heads
    if not num_items:
        return None
    programs = min(num_items, max(1, num_sms(device) - inputs.sm_margin))
    queries, keys = inputs.segments
    on_host = build_map(
        keys, queries, Mask(mask.right, mask.left), *reversed(blocks), keep_empty=keep_empty
    )
    order = work_order(*on_host, keys, launch.num_kv_heads, programs, CONFIG.block_m)
    items = torch.from_numpy(order).pin_memory().to(device, non_blocking=True)
    q_head_start, q_per_kv, scale, _, _, left, right = launch.scalars
    scalars = (
        num_items,
        tiles.num_tiles,
        launch.num_heads,
        q_head_start,
        q_per_kv,
        scale,
        left,
        right,
        launch.options.softmax_scale,
        *inputs.strides[1:8:2],
        inputs.strides[8],
        dq.row_strides[1],
        *inputs.dk.row_strides,
        *inputs.dv.row_strides,
    )
    flags = launch.flags
    constants = {
        "BLOCK_M": CONFIG.block_m,
        "D": launch.head_dim,
        "STAGES": CONFIG.num_stages,
        "HAS_LEFT": flags["HAS_LEFT"],
        "HAS_RIGHT": flags["HAS_RIGHT"],
        "ACCUMULATE": inputs.accumulate,
        "num_warps": CONFIG.num_warps,
    }
    loaded = [
        with_layout(x, inputs.q.dtype) for x in inputs.bounded_blocks(CONFIG)[:4] if x is not None
    ]
    added = bounded_blocks(dq, CONFIG.block_m)
    added = added._replace(block_shape=[1, 1, CONFIG.block_m, COLUMNS.value])
    work = Prepared(
        _backward_kernel, (programs,), scalars, constants,
        tiles=tiles,
        blocks=[*loaded, None, None, with_layout(added, dq.dtype), *[None] * 4],
    )  # fmt: skip
    return Guarded(work, "backward", inputs.q.dtype, launch.head_dim), items
