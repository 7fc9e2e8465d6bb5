"""A consumer of the forward: 64 query rows against the ring of keys and values.

Both consumers read the same ring but never wait for each other's softmax: while one is in its
softmax, the tensor cores work for the other. Inside a consumer, step j:

    issue S(j) = Q K(j)^T                      Q in registers up to head dimension 128
    rescale acc, unless no row maximum moved
    issue acc += P(j-1) V(j-1)                 P in registers
    wait for S(j); softmax of S(j)             runs beside the second product
    wait for the second product; give V(j-1) back

A tile meets its edge spans first, under a mask, then its full spans without one. The first block
stands before the loops and always has the mask. State of earlier launches joins at the end of a
tile. Up to head dimension 128 the copy engine brings it during the tile and takes the new one
away during the next.

docs/hopper-kernels.md explains the lines marked "for the compiler".
"""

from __future__ import annotations

from hexiseq_triton.kernels.hopper.api import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from hexiseq_triton.kernels.hopper.blocks import (
    LN2,
    LOG2E,
    LOWEST,
    add_rows,
    bounded_at,
    by_thread,
    capped,
    copy_rows,
    four_dimensional,
    key_range,
    load_span_unless,
    store_rows,
    thread_columns,
)
from hexiseq_triton.kernels.hopper.forward_producer import (
    EDGE_BEGIN,
    EDGE_END,
    FIRST_POSITION,
    FIRST_ROWS,
    FULL_ROWS,
    HEAD,
    KEYS_FREE,
    NUM_ROWS,
    POSITION,
    QUERIES_FREE,
    ROW,
    ROWS,
    VALUES_FREE,
    give_back,
    names_barriers,
    tile_number,
)
from hexiseq_triton.kernels.hopper.named import (
    ALL,
    CONSUMER_AND_PRODUCER,
    pass_turn,
    take_turn,
)
from hexiseq_triton.kernels.hopper.softmax import first_step, rescale, softmax_step

IN_REGISTERS = gl.constexpr(128)  # the largest head dimension whose queries stay in registers


@gluon.constexpr_function
def layout_of(rows):
    """Return the layout in shared memory of the blocks of a descriptor [1, 1, ROWS, D]."""
    return gl.NVMMASharedLayout.get_default_for(rows.block_shape[2:], rows.dtype)


@gluon.jit
def _seen_scores(
    s, low, high, k_rows, k_position, scale, cap_scale, cap,
    MASKED: gl.constexpr, HAS_LEFT: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Return the scores [ROWS, BLOCK_N] with their cap; -inf where no key is seen."""
    if SOFTCAP:
        s = cap * capped(s, cap_scale)
    if MASKED:
        x = by_thread(s)
        XL: gl.constexpr = x.type.layout
        RL: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, XL)))
        known, lane = thread_columns(s.shape[1], XL)
        last = gl.minimum(high - k_position, k_rows - 1)
        last = gl.convert_layout(last, RL, assert_trivial=True)[:, None, None, None]
        seen = known <= last - lane
        if HAS_LEFT:
            first = gl.convert_layout(low - k_position, RL, assert_trivial=True)
            seen = seen & (known >= first[:, None, None, None] - lane)
        x = gl.where(seen, x, float("-inf"))
        s = gl.convert_layout(x.reshape(s.shape), s.type.layout, assert_trivial=True)
    return s


@gluon.jit
def _attend(
    W: gl.constexpr, q, zeros, acc, p, factor, m, total, at,
    keys, values, k_full, k_free, v_full, v_free,
    low, high, k_rows, k_position, scale, cap_scale, cap,
    MASKED: gl.constexpr, HAS_LEFT: gl.constexpr, SOFTCAP: gl.constexpr, EXACT: gl.constexpr,
    STAGES: gl.constexpr, NAMED: gl.constexpr,
):  # fmt: skip
    """Take the scores of block `at + 1`, and add what block `at` gives to acc."""
    DTYPE: gl.constexpr = keys.dtype
    PL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    IN_HALVES: gl.constexpr = values.shape[2] > 64  # where registers are short
    stage = at % STAGES
    next_stage = (at + 1) % STAGES
    next_phase = ((at + 1) // STAGES) & 1
    mbarrier.wait(k_full.index(next_stage), next_phase)
    take_turn(8 + W)
    s = warpgroup_mma(
        q, keys.index(next_stage).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    mbarrier.wait(v_full.index(stage), (at // STAGES) & 1)  # long satisfied; for the compiler
    acc = rescale(acc, factor)
    acc = warpgroup_mma(
        gl.convert_layout(p, PL, assert_trivial=True), values.index(stage), acc, is_async=True
    )
    pass_turn(9 - W)
    s = warpgroup_mma_wait(1, deps=(s,))
    give_back(KEYS_FREE, next_stage, k_free, ALL, NAMED)
    s = _seen_scores(
        s, low, high, k_rows, k_position, scale, cap_scale, cap, MASKED, HAS_LEFT, SOFTCAP
    )
    p, factor, m, total = softmax_step(s, m, total, scale, DTYPE, EXACT, IN_HALVES)
    mbarrier.wait(v_full.index(next_stage), next_phase)  # needed in the next step; for the compiler
    acc = warpgroup_mma_wait(0, deps=(acc,))
    give_back(VALUES_FREE, stage, v_free, ALL, NAMED)
    return acc, p, factor, m, total


@gluon.jit
def consume(
    W: gl.constexpr, o, lse, out, out_tiles, sink, tile_map, queries, keys, values, staged, records,
    q_full, q_free, k_full, k_free, v_full, v_free, state_full,
    num_tiles, scale, cap_scale, cap, left, right,
    stride_ot, stride_oh, stride_lse, stride_outt, stride_outh,
    BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    HAS_LEFT: gl.constexpr, SOFTCAP: gl.constexpr,
    FIRST: gl.constexpr, STAGED: gl.constexpr, HAS_SINK: gl.constexpr, EXACT: gl.constexpr,
):  # fmt: skip
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    AL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    QL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SL, k_width=2)
    PL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=AL, k_width=2)
    RL: gl.constexpr = gl.SliceLayout(1, SL)
    ARL: gl.constexpr = gl.SliceLayout(1, AL)
    DTYPE: gl.constexpr = keys.dtype
    SMALL: gl.constexpr = D <= IN_REGISTERS
    JOINS: gl.constexpr = SMALL and not FIRST  # the old state, by way of shared memory
    NAMED: gl.constexpr = names_barriers(D)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, SL)
    offsets = gl.arange(0, ROWS, RL)
    if W == 1:
        pass_turn(8)  # consumer 0 issues first; then they alternate
    at = 0
    turn = 0
    q_phase = 0
    tile_rows = 1  # not read, for the compiler: a program without work has a tile without rows
    mbarrier.wait(q_full.index(W), 0)
    while tile_rows > 0:
        head = tile_number(records, turn, HEAD)
        row = tile_number(records, turn, ROW) + W * ROWS
        num_rows = tile_number(records, turn, NUM_ROWS) - W * ROWS
        position = tile_number(records, turn, POSITION) + W * ROWS
        edge_begin = tile_number(records, turn, EDGE_BEGIN)
        edge_end = tile_number(records, turn, EDGE_END)
        k_rows = tile_number(records, turn, FIRST_ROWS)
        k_position = tile_number(records, turn, FIRST_POSITION)
        full_rows = tile_number(records, turn, FULL_ROWS)
        low, high = key_range(position + offsets, left, right, HAS_LEFT)
        acc = gl.zeros([ROWS, D], gl.float32, AL)

        # the first block
        stage = at % STAGES
        phase = (at // STAGES) & 1
        q = queries.index(W).load(QL) if SMALL else queries.index(W)
        mbarrier.wait(k_full.index(stage), phase)
        s = warpgroup_mma(q, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        give_back(KEYS_FREE, stage, k_free, ALL, NAMED)
        if SMALL:  # only after a product has used them: see the traps
            give_back(QUERIES_FREE, W, q_free, CONSUMER_AND_PRODUCER, NAMED)
        if JOINS:
            tma.store_wait(0)  # the previous tile's state has left
            partition_barrier()
            mbarrier.expect(state_full.index(W), o.block_type.nbytes)
            copy_rows(
                o, row, num_rows, head * stride_oh, state_full.index(W), staged.index(W)
            )  # fmt: skip
        s = _seen_scores(
            s, low, high, k_rows, k_position, scale, cap_scale, cap, True, HAS_LEFT, SOFTCAP
        )
        p, m, total = first_step(s, scale, DTYPE)
        factor = gl.full_like(total, 1.0)
        mbarrier.wait(v_full.index(stage), phase)

        # the other blocks of edges, then the full ones, of which only the number matters here
        for span in range(edge_begin, edge_end):
            _row, k_rows, k_position = load_span_unless(
                span == edge_begin, 0, k_rows, k_position, tile_map, num_tiles, span
            )
            begin = gl.where(span == edge_begin, BLOCK_N, 0)
            for offset in range(begin, k_rows, BLOCK_N):
                acc, p, factor, m, total = _attend(
                    W, q, zeros, acc, p, factor, m, total, at,
                    keys, values, k_full, k_free, v_full, v_free,
                    low, high, k_rows - offset, k_position + offset, scale, cap_scale, cap,
                    True, HAS_LEFT, SOFTCAP, EXACT, STAGES, NAMED,
                )  # fmt: skip
                at += 1
        first_is_full = gl.where(edge_begin < edge_end, 0, BLOCK_N)
        for _block in range((full_rows - first_is_full) // BLOCK_N):
            acc, p, factor, m, total = _attend(
                W, q, zeros, acc, p, factor, m, total, at,
                keys, values, k_full, k_free, v_full, v_free,
                low, high, 0, 0, scale, cap_scale, cap,
                False, HAS_LEFT, SOFTCAP, EXACT, STAGES, NAMED,
            )  # fmt: skip
            at += 1

        lse_at = lse + head.to(gl.int64) * stride_lse + row + offsets
        if not FIRST:
            old = gl.load(lse_at, mask=offsets < num_rows, other=float("-inf")) * LOG2E
        stage = at % STAGES
        acc = rescale(acc, factor)
        acc = warpgroup_mma(
            gl.convert_layout(p, PL, assert_trivial=True), values.index(stage), acc, is_async=True
        )
        acc = warpgroup_mma_wait(0, deps=(acc,))
        give_back(VALUES_FREE, stage, v_free, ALL, NAMED)
        at += 1

        top = gl.convert_layout(gl.max(m, 1), RL)
        row_total = gl.convert_layout(gl.sum(total, 1), RL)
        if not FIRST:
            none = old == float("-inf")
            new_top = gl.maximum(top, gl.where(none, LOWEST, old))
            weight = gl.exp2(top - new_top)
            old_weight = gl.where(none, 0.0, gl.exp2(old - new_top))
            row_total = row_total * weight + old_weight
            top = new_top
        empty = row_total == 0.0
        new_lse = gl.where(empty, float("-inf"), (top + gl.log2(row_total)) * LN2)
        gl.store(lse_at, new_lse, mask=offsets < num_rows)
        if HAS_SINK:
            row_total += gl.exp2(gl.load(sink + head) * LOG2E - top)
        inverse = gl.where(empty, 0.0, 1.0 / row_total)
        if FIRST:
            acc = acc * gl.convert_layout(inverse, ARL, assert_trivial=True)[:, None]
        else:
            acc = acc * gl.convert_layout(weight * inverse, ARL, assert_trivial=True)[:, None]
            old_weight = gl.convert_layout(old_weight * inverse, ARL, assert_trivial=True)
            if JOINS:
                mbarrier.wait(state_full.index(W), q_phase)
                old_acc = staged.index(W).load(AL)
                acc += old_acc * old_weight[:, None]
            else:
                acc = add_rows(acc, old_weight, o, row, num_rows, head, stride_ot, stride_oh, 0)
        if STAGED:
            place = staged.index(W)
            if place.dtype != out_tiles.dtype:
                halves = staged._reinterpret(out_tiles.dtype, [4, ROWS, D], queries.layout)
                place = halves.index(2 * W)  # Triton 3.8 reinterprets whole buffers only
            if SMALL and FIRST:
                tma.store_wait(0)  # the previous tile's output has left
            partition_barrier()
            place.store(acc.to(place.dtype))
            fence_async_shared()
            partition_barrier()
            tma.async_copy_shared_to_global(
                out_tiles, bounded_at(out_tiles, row, num_rows, head * stride_outh),
                four_dimensional(place, out_tiles),
            )  # fmt: skip
        else:
            store_rows(out, acc, row, num_rows, head, stride_outt, stride_outh, False)
        if not SMALL:  # the output passes through the place of the queries
            if STAGED:
                tma.store_wait(0)
            give_back(QUERIES_FREE, W, q_free, CONSUMER_AND_PRODUCER, NAMED)
        turn += 1
        q_phase ^= 1
        mbarrier.wait(q_full.index(W), q_phase)
        tile_rows = tile_number(records, turn, NUM_ROWS)
    if STAGED:
        tma.store_wait(0)
