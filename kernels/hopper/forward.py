"""Attention forward for Hopper: the launches of kernels/forward.py, by a warp-specialised kernel.

A program stays on its multiprocessor and walks the work items. It has four warpgroups: two
consumers with 64 query rows each, and a producer warp that drives the copy engine (Triton fills
it up to a warpgroup). Both consumers read the same ring of keys and values but never wait for
each other's softmax: while one is in its softmax, the tensor cores work for the other. Inside a
consumer, step j:

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

from collections.abc import Callable
from dataclasses import dataclass

from hexiseq_triton.kernels.blocks import VARYING
from hexiseq_triton.kernels.configs import num_sms
from hexiseq_triton.kernels.forms import Form, bounded_blocks
from hexiseq_triton.kernels.forward_call import ForwardCall
from hexiseq_triton.kernels.hopper import guard
from hexiseq_triton.kernels.hopper.api import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
    with_layout,
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
    first_span,
    four_dimensional,
    key_range,
    load_span,
    load_tile,
    num_items,
    store_rows,
    thread_columns,
    work_item,
)
from hexiseq_triton.kernels.hopper.forward_producer import (
    KEYS_FREE,
    QUERIES_FREE,
    ROWS,
    VALUES_FREE,
    give_back,
    names_barriers,
    produce,
)
from hexiseq_triton.kernels.hopper.named import (
    ALL,
    CONSUMER_AND_PRODUCER,
    pass_turn,
    take_turn,
)
from hexiseq_triton.kernels.hopper.softmax import first_step, rescale, softmax_step
from hexiseq_triton.kernels.launch import Launch
from hexiseq_triton.kernels.prepared import Prepared
from hexiseq_triton.kernels.tilemap import query_tiles

IN_REGISTERS = gl.constexpr(128)  # the largest head dimension whose queries stay in registers


@gluon.constexpr_function
def _layout(rows):
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
def _consume(
    W: gl.constexpr, o, lse, out, out_tiles, sink, tile_map, queries, keys, values, staged,
    q_full, q_free, k_full, k_free, v_full, v_free, state_full,
    num_tiles, num_heads, heads_together, scale, cap_scale, cap, left, right,
    stride_ot, stride_oh, stride_lse, stride_outt, stride_outh,
    BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr,
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
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    if W == 1:
        pass_turn(8)  # consumer 0 issues first; then they alternate
    at = 0
    for turn in range(num_items(num_tiles * num_heads, programs, program)):
        tile, head = work_item(turn, programs, program, num_tiles, num_heads, heads_together)
        row, num_rows, position, full_begin, edge_begin, edge_end = load_tile(tile_map, tile)
        row += W * ROWS
        num_rows -= W * ROWS
        offsets = gl.arange(0, ROWS, RL)
        low, high = key_range(position + W * ROWS + offsets, left, right, HAS_LEFT, HAS_RIGHT)
        acc = gl.zeros([ROWS, D], gl.float32, AL)

        # the first block
        stage = at % STAGES
        phase = (at // STAGES) & 1
        _row, k_rows, k_position = first_span(tile_map, num_tiles, full_begin, edge_begin, edge_end)
        mbarrier.wait(q_full.index(W), turn & 1)
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
        begin = BLOCK_N
        for span in range(edge_begin, edge_end):
            _row, k_rows, k_position = load_span(tile_map, num_tiles, span)
            for offset in range(begin, k_rows, BLOCK_N):
                acc, p, factor, m, total = _attend(
                    W, q, zeros, acc, p, factor, m, total, at,
                    keys, values, k_full, k_free, v_full, v_free,
                    low, high, k_rows - offset, k_position + offset, scale, cap_scale, cap,
                    True, HAS_LEFT, SOFTCAP, EXACT, STAGES, NAMED,
                )  # fmt: skip
                at += 1
            begin = 0
        full_rows = -begin
        for span in range(full_begin, edge_begin):
            _row, k_rows, _position = load_span(tile_map, num_tiles, span)
            full_rows += k_rows
        for _block in range(full_rows // BLOCK_N):
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
                mbarrier.wait(state_full.index(W), turn & 1)
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
            store_rows(out, acc, row, num_rows, head, stride_outt, stride_outh)
        if not SMALL:  # the output passes through the place of the queries
            if STAGED:
                tma.store_wait(0)
            give_back(QUERIES_FREE, W, q_free, CONSUMER_AND_PRODUCER, NAMED)
    if STAGED:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=VARYING)
def _forward_kernel(
    q, k, v, o, lse, out, out_tiles, sink, tile_map,
    num_tiles, num_heads, heads_together, q_head_start, q_per_kv,
    scale, cap_scale, cap, left, right,
    stride_qh, stride_kh, stride_vh,
    stride_ot, stride_oh, stride_lse, stride_outt, stride_outh,
    BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr,
    FIRST: gl.constexpr, STAGED: gl.constexpr, HAS_SINK: gl.constexpr, EXACT: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = q.dtype
    queries = gl.allocate_shared_memory(DTYPE, [2, ROWS, D], q.layout)
    keys = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, D], k.layout)
    values = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, D], k.layout)
    if D <= IN_REGISTERS and not FIRST:
        staged = gl.allocate_shared_memory(gl.float32, [2, ROWS, D], _layout(o))
    elif D <= IN_REGISTERS and STAGED:
        staged = gl.allocate_shared_memory(out_tiles.dtype, [2, ROWS, D], _layout(out_tiles))
    else:
        staged = queries  # not read again by then
    bl: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], bl)
    q_free = gl.allocate_shared_memory(gl.int64, [2, 1], bl)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bl)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bl)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bl)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bl)
    state_full = gl.allocate_shared_memory(gl.int64, [2, 1], bl)
    for i in gl.static_range(2):
        mbarrier.init(state_full.index(i), count=1)
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_free.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)  # both consumers
        mbarrier.init(v_free.index(i), count=2)
    gl.warp_specialize(
        [
            (_consume, (
                0, o, lse, out, out_tiles, sink, tile_map, queries, keys, values, staged,
                q_full, q_free, k_full, k_free, v_full, v_free, state_full,
                num_tiles, num_heads, heads_together, scale, cap_scale, cap, left, right,
                stride_ot, stride_oh, stride_lse, stride_outt, stride_outh,
                BLOCK_N, D, STAGES, HAS_LEFT, HAS_RIGHT, SOFTCAP, FIRST, STAGED, HAS_SINK, EXACT,
            )),
            (_consume, (
                1, o, lse, out, out_tiles, sink, tile_map, queries, keys, values, staged,
                q_full, q_free, k_full, k_free, v_full, v_free, state_full,
                num_tiles, num_heads, heads_together, scale, cap_scale, cap, left, right,
                stride_ot, stride_oh, stride_lse, stride_outt, stride_outh,
                BLOCK_N, D, STAGES, HAS_LEFT, HAS_RIGHT, SOFTCAP, FIRST, STAGED, HAS_SINK, EXACT,
            )),
            (produce, (
                q, k, v, tile_map, queries, keys, values,
                q_full, q_free, k_full, k_free, v_full, v_free,
                num_tiles, num_heads, heads_together, q_head_start, q_per_kv,
                stride_qh, stride_kh, stride_vh, BLOCK_N, STAGES, names_barriers(D),
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@dataclass(frozen=True)
class Tile:
    """Keys of a step and how many steps of keys and values are in shared memory."""

    block_n: int
    stages: int


TILES = {64: Tile(128, 2), 128: Tile(128, 2), 256: Tile(64, 2)}
"""By head dimension; a program takes 128 queries."""

L2_BYTES = 42e6  # of the 50 MB of L2, for keys and values of the heads that run together


def prepare(call: ForwardCall) -> Callable[..., None] | None:
    """Check everything and return what takes (q, k, v, o, lse, out, sink) and does the call; None
    where the copy engine can't take a tensor, or nothing is to do.

    A sink is passed if the call has one.
    """
    launch = call.launch()
    q, k, v, o, lse, out, *_ = call
    if not launch.fits_descriptors(q, k, v):
        return None
    tile = TILES[launch.head_dim]
    tiles = query_tiles(
        call.q_segments.segments, call.kv_segments.segments, call.options.mask,
        2 * ROWS.value, tile.block_n, q.device, keep_empty=call.first or call.last,
    )  # fmt: skip
    items = tiles.num_tiles * launch.num_heads
    if not items:
        return None
    small = launch.head_dim <= IN_REGISTERS.value
    joins = small and not call.first
    staged = small or (call.first and out.dtype.itemsize == 2)
    staged = staged and launch.fits_descriptors(out)
    if small and not (staged and (call.first or launch.fits_descriptors(o))):
        return None
    scalars = (
        tiles.num_tiles,
        launch.num_heads,
        heads_together(launch, k),
        *launch.scalars,
        q.row_strides[1],
        k.row_strides[1],
        v.row_strides[1],
        *o.row_strides,
        lse.strides[0],
        *out.row_strides,
    )
    constants = {
        "BLOCK_N": tile.block_n,
        "D": launch.head_dim,
        "STAGES": tile.stages,
        **launch.score_flags,
        "FIRST": call.first,
        "STAGED": staged,
        "HAS_SINK": call.sink is not None,
        "EXACT": guard.exact_maximum(),
        "num_warps": 4,
    }
    cut = (q.blocks(ROWS.value), k.blocks(tile.block_n), bounded_blocks(v, tile.block_n))
    loaded = [with_layout(x, q.dtype) for x in cut]
    rows = [bounded_blocks(x, ROWS.value) for x in (o, out)]
    state, written = (with_layout(x, y.dtype) for x, y in zip(rows, (o, out), strict=True))
    programs = min(items, max(1, num_sms(q.device) - call.sm_margin))
    work = Prepared(
        _forward_kernel, (programs,), scalars, constants,
        tiles=tiles,
        blocks=[*loaded, state if joins else None, None, None, written if staged else None, None],
    )  # fmt: skip
    guarded = guard.Guarded(work, "forward", q.dtype, launch.head_dim)
    # `out` by pointers and by blocks; o and lse for what is not there
    return lambda q, k, v, o, lse, out, sink=None: guarded(
        q, k, v, o, lse, out, out, lse if sink is None else sink
    )


def heads_together(launch: Launch, k: Form) -> int:
    """Return how many query heads should run together, so that their keys and values fit the L2."""
    head_bytes = 2 * k.shape[0] * k.shape[2] * k.dtype.itemsize
    fit = max(1, int(L2_BYTES // head_bytes))
    groups = -(-launch.num_kv_heads // fit)
    return -(-launch.num_kv_heads // groups) * launch.heads.q_per_kv
