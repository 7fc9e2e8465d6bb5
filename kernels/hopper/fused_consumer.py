"""A consumer of the fused backward: what its keys give of dK and dV, and its half of dQ.

Each consumer needs the ds of the other for its half of dq, which is 64 columns at head dimension
128 and 64 queries at 64: they meet in shared memory. dq of a block is computed one block late, so
that nobody waits and the tensor cores work while ds is formed. The copy engine adds it to memory,
in float32, in any order: its last bits differ from run to run.

Threads meet at named barriers (named.py). Nobody arrives again too early: a consumer writes ds of a
block after it has met the other one over the block before, and waits for its stage of queries to be
filled again, which is after all have given it back.

docs/hopper-kernels.md explains the lines marked "for the compiler".
"""

from __future__ import annotations

from hexiseq_triton.kernels.hopper.api import (
    AHEAD_AT_64,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma,
    tma_add,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from hexiseq_triton.kernels.hopper.blocks import (
    bounded_at,
    four_dimensional,
    get,
    load_rows,
    store_rows,
)
from hexiseq_triton.kernels.hopper.named import ALL, CONSUMERS, arrive, meet, meet_if
from hexiseq_triton.kernels.hopper.producer import (
    FIRST_KEY,
    KV_HEAD,
    NUM_BLOCKS,
    NUM_KEYS,
    QUERIES_FREE,
    scales_early,
)
from hexiseq_triton.kernels.hopper.scores import probabilities, unpacked

KEYS = gl.constexpr(64)  # keys of a consumer
COLUMNS = gl.constexpr(64)  # of dq that a consumer computes
DS_FULL = gl.constexpr(4)
"""The named barrier of the first consumer's ds in its first place; the others follow."""


@gluon.jit
def _grad_q(W: gl.constexpr, keys, ds, zeros):
    """Issue this consumer's half of dq^T = k^T ds^T: some of the columns, or of the queries."""
    D: gl.constexpr = keys.shape[1]
    COLUMNS: gl.constexpr = zeros.shape[0]
    QUERIES: gl.constexpr = zeros.shape[1]
    k_part = keys
    if COLUMNS < D:
        k_part = keys.slice(W * COLUMNS, COLUMNS, 1)
    else:
        ds = ds.slice(W * QUERIES, QUERIES, 1)
    return warpgroup_mma(k_part.permute((1, 0)), ds, zeros, use_acc=False, is_async=True)


@gluon.jit
def _stage_grad_q(dq, staged, softmax_scale, EARLY: gl.constexpr):
    """Put dq^T [columns, queries] where the copy engine takes it; a fence must follow. Its last
    addition must have read what it adds."""
    if not EARLY:
        dq = dq * softmax_scale
    staged.permute((1, 0)).store(dq)


@gluon.jit
def _place_of(
    slot, is_read, counts, places, columns, FIRST_ROW: gl.constexpr, FIRST_COLUMN: gl.constexpr
):
    """Return row, rows and column in dq of this consumer's part of a block; of what nobody reads
    0 rows are added."""
    rows = gl.where(is_read, get(counts.index(slot)) - FIRST_ROW, 0)
    return get(places.index(slot)) + FIRST_ROW, rows, get(columns.index(slot)) + FIRST_COLUMN


@gluon.jit
def _add_grad_q(dq_rows, staged, row, num_rows, column):
    """Let the copy engine add what is staged to `num_rows` rows in memory."""
    tma_add(dq_rows, bounded_at(dq_rows, row, num_rows, column), four_dimensional(staged, dq_rows))


@gluon.jit
def consume(
    W: gl.constexpr, dk, dv, dq_rows, work,
    keys, values, queries, grads, lses, deltas, places, counts, columns, diagonals,
    exchanged, staged_all,
    kv_full, k_free, v_free, q_full, do_full,
    scale, cap_scale, cap, left, right, softmax_scale,
    stride_dkt, stride_dkh, stride_dvt, stride_dvh,
    BLOCK_M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    HAS_LEFT: gl.constexpr, SOFTCAP: gl.constexpr,
    FUSED: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    AL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=AL, k_width=2)
    QUERIES: gl.constexpr = staged_all.shape[1]
    COLUMNS: gl.constexpr = staged_all.shape[2]
    QL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    CL: gl.constexpr = gl.SliceLayout(0, SL)
    DTYPE: gl.constexpr = keys.dtype
    FIRST_ROW: gl.constexpr = W * QUERIES if D == COLUMNS else 0
    FIRST_COLUMN: gl.constexpr = 0 if D == COLUMNS else W * COLUMNS
    EARLY: gl.constexpr = scales_early(DTYPE)
    LATE: gl.constexpr = BLOCK_M > KEYS  # dp after p, where both do not fit the registers
    # read numbers ahead of a wait that hides the time it takes, where registers are left for them
    AHEAD: gl.constexpr = EARLY and not SOFTCAP and (AHEAD_AT_64 or not LATE)
    SCORES_AHEAD: gl.constexpr = AHEAD and not LATE  # at 64 it would cost 13%
    PLACE_AHEAD: gl.constexpr = AHEAD and LATE
    PIECES: gl.constexpr = D > COLUMNS  # at 64 no shared memory is left for it
    SLOTS: gl.constexpr = STAGES + 1
    MY_DS: gl.constexpr = DS_FULL + W * SLOTS
    OTHER_DS: gl.constexpr = DS_FULL + (1 - W) * SLOTS
    staged = staged_all.index(W)
    zeros = gl.zeros([KEYS, BLOCK_M], gl.float32, SL)
    no_dq = gl.zeros([COLUMNS, QUERIES], gl.float32, QL)
    begin = 0  # blocks so far
    turn = 0
    mbarrier.wait(kv_full, 0)
    blocks = get(work.index(NUM_BLOCKS))
    while blocks >= 0:
        kv_head = get(work.index(KV_HEAD))
        k_row = get(work.index(FIRST_KEY))
        k_rows = get(work.index(NUM_KEYS))
        end = begin + blocks
        dk_block = gl.zeros([KEYS, D], gl.float32, AL)
        dv_block = gl.zeros([KEYS, D], gl.float32, AL)
        for n in range(begin, end):
            # 0, which the compiler must not know: it would keep 24 descriptors in registers
            o = n >> 30
            stage = n % STAGES
            phase = n // STAGES & 1
            slot = n % SLOTS
            old_slot = (n + STAGES) % SLOTS
            k_mine = keys.index(o).slice(W * KEYS, KEYS, 0)
            v_mine = values.index(o).slice(W * KEYS, KEYS, 0)
            mbarrier.wait(q_full.index(stage), phase)
            if SCORES_AHEAD:
                row_lse = lses.index(stage).load(CL)
            s = warpgroup_mma(
                k_mine, queries.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            if SCORES_AHEAD:
                diagonal = get(diagonals.index(stage))
            if not LATE:
                mbarrier.wait(do_full.index(stage), phase)
                dp = warpgroup_mma(
                    v_mine, grads.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
                )
            s = warpgroup_mma_wait(0 if LATE else 1, deps=(s,))
            if not SCORES_AHEAD:
                row_lse = lses.index(stage).load(CL)
                diagonal = get(diagonals.index(stage))
            p, weight = probabilities(
                s, row_lse, diagonal, W * KEYS, k_rows,
                scale, cap_scale, cap, left, right, DTYPE, HAS_LEFT, SOFTCAP,
            )  # fmt: skip
            pb = gl.convert_layout(p, PL)
            if LATE:
                mbarrier.wait(do_full.index(stage), phase)
                dp = warpgroup_mma(
                    v_mine, grads.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
                )
                dv_next = warpgroup_mma(pb, grads.index(stage), dv_block, is_async=True)
            if AHEAD:
                row_delta = deltas.index(stage).load(CL)[None, :]
            if FUSED:
                # dq of the block before; for a tile's first block a product that nobody reads
                meet_if(n > begin, OTHER_DS + old_slot, CONSUMERS)
                dq = _grad_q(W, keys.index(o), exchanged.index(old_slot), no_dq)
            if not LATE:
                dv_next = warpgroup_mma(pb, grads.index(stage), dv_block, is_async=True)
            if FUSED:
                if PLACE_AHEAD:
                    row, rows, column = _place_of(
                        old_slot, n > begin, counts, places, columns, FIRST_ROW, FIRST_COLUMN
                    )
                # the last addition has read its place, and all warps meet: ds needs that too
                tma.store_wait(0)
            dp = warpgroup_mma_wait(2 if FUSED else 1, deps=(dp,))
            if not AHEAD:
                row_delta = deltas.index(stage).load(CL)[None, :]
            # from 16 bits: in float32 p would take 16 more registers
            dp = dp * softmax_scale - row_delta if EARLY else dp - row_delta
            ds = (unpacked(weight) * dp).to(DTYPE)
            if FUSED:
                if LATE:  # one fence for both, which is 5% at 64; at 128 it would cost 1 to 3%
                    dq = warpgroup_mma_wait(0, deps=(dq,))
                    _stage_grad_q(dq, staged, softmax_scale, EARLY)
                exchanged.index(slot).slice(W * KEYS, KEYS, 0).store(ds)
                fence_async_shared()
                arrive(MY_DS + slot, CONSUMERS)
            ds = gl.convert_layout(ds, PL)
            dk_next = warpgroup_mma(ds, queries.index(stage), dk_block, is_async=True)
            if FUSED:
                if not LATE:
                    dq = warpgroup_mma_wait(2, deps=(dq,))
                    _stage_grad_q(dq, staged, softmax_scale, EARLY)
                    fence_async_shared()
                if not PLACE_AHEAD:
                    row, rows, column = _place_of(
                        old_slot, n > begin, counts, places, columns, FIRST_ROW, FIRST_COLUMN
                    )
                _add_grad_q(dq_rows, staged, row, rows, column)
            dk_block, dv_block, pb, ds = warpgroup_mma_wait(0, deps=(dk_next, dv_next, pb, ds))
            arrive(QUERIES_FREE + stage, ALL)
        mbarrier.arrive(v_free, count=1)
        if FUSED and end > begin:
            old_slot = (end + STAGES) % SLOTS
            meet(OTHER_DS + old_slot, CONSUMERS)
            dq = _grad_q(W, keys.index(0), exchanged.index(old_slot), no_dq)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            mbarrier.arrive(k_free, count=1)
            tma.store_wait(0)
            _stage_grad_q(dq, staged, softmax_scale, EARLY)
            fence_async_shared()
            row, rows, column = _place_of(
                old_slot, True, counts, places, columns, FIRST_ROW, FIRST_COLUMN
            )
            _add_grad_q(dq_rows, staged, row, rows, column)
        else:
            mbarrier.arrive(k_free, count=1)
        begin = end
        mine = k_row + W * KEYS
        count = k_rows - W * KEYS
        if not EARLY:
            dk_block = dk_block * softmax_scale
        if ACCUMULATE:
            dk_block += load_rows(dk, mine, count, kv_head, stride_dkt, stride_dkh, dk_block)
            dv_block += load_rows(dv, mine, count, kv_head, stride_dvt, stride_dvh, dv_block)
        store_rows(dv, dv_block, mine, count, kv_head, stride_dvt, stride_dvh, PIECES)
        store_rows(dk, dk_block, mine, count, kv_head, stride_dkt, stride_dkh, PIECES)
        turn += 1
        mbarrier.wait(kv_full, turn & 1)
        blocks = get(work.index(NUM_BLOCKS))
    if FUSED:
        tma.store_wait(0)
