"""The producer warp of the backward, and the order in which it brings blocks of queries.

For each work item it loads the keys and values of a tile, then every block of queries that sees
the tile, of all query heads that share the KV head: q and do by the copy engine, lse, delta and
what the consumers need to know of the block by itself. Where a block's dq belongs they need to know
one block longer than they need its queries: there is a place more for it than there are stages.
"""

from __future__ import annotations

from hexiseq_triton.kernels.hopper.api import gl, gluon, mbarrier
from hexiseq_triton.kernels.hopper.blocks import LOG2E, copy_rows, load_span, load_tile
from hexiseq_triton.kernels.hopper.named import ALL, meet_if

QUERIES_FREE = gl.constexpr(12)
"""The named barrier of the first stage of queries; those of the others follow."""
NUM_BLOCKS = gl.constexpr(0)
"""Where a work item has its number of blocks, heads counted apart; -1 after the last item."""
KV_HEAD = gl.constexpr(1)
FIRST_KEY = gl.constexpr(2)
NUM_KEYS = gl.constexpr(3)
WORK_FIELDS = gl.constexpr(4)
UNMASKED = gl.constexpr(1 << 30)
"""In place of a distance: every query of the block sees every key of the tile."""


@gluon.constexpr_function
def scales_early(dtype):
    """Return whether ds has the softmax scale, which is free there; in fp16 it could underflow."""
    return dtype == gl.bfloat16


@gluon.jit
def put(place, number):
    """Store a number in shared memory, by a warp."""
    place.store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def _heads_of(kv_head, num_heads, q_head_start, q_per_kv):
    """Return the first of the query heads that read `kv_head`, of those here, and their number."""
    group = q_head_start // q_per_kv + kv_head
    begin = gl.maximum(group * q_per_kv - q_head_start, 0)
    end = gl.minimum((group + 1) * q_per_kv - q_head_start, num_heads)
    return begin, end - begin


@gluon.jit
def num_blocks(tile_map, num_tiles, full_begin, edge_end, BLOCK_M: gl.constexpr):
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
def produce(
    q, k, v, do, lse, delta, items, counter, tile_map, work,
    keys, values, queries, grads, lses, deltas, places, counts, columns, diagonals,
    kv_full, k_free, v_free, q_full, do_full,
    num_items, num_tiles, num_heads, q_head_start, q_per_kv, softmax_scale,
    stride_qh, stride_kh, stride_vh, stride_doh, stride_row, stride_dqh,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    L: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    offsets = gl.arange(0, BLOCK_M, L)
    stage = 0
    slot = 0
    filled = 0
    turn = 0
    item = gl.atomic_add(counter, 1, sem="relaxed")
    while item < num_items:
        tile = gl.load(items + 3 * item)
        kv_head = gl.load(items + 3 * item + 1)
        ahead = gl.load(items + 3 * item + 2) != 0
        k_row, k_rows, k_position, full_begin, edge_begin, edge_end = load_tile(tile_map, tile)
        head_begin, group = _heads_of(kv_head, num_heads, q_head_start, q_per_kv)
        blocks = num_blocks(tile_map, num_tiles, full_begin, edge_end, BLOCK_M) * group
        mbarrier.wait(v_free, (turn & 1) ^ 1)
        mbarrier.expect(kv_full, k.block_type.nbytes + v.block_type.nbytes)
        copy_rows(v, k_row, k_rows, kv_head * stride_vh, kv_full, values.index(0))
        mbarrier.wait(k_free, (turn & 1) ^ 1)
        copy_rows(k, k_row, k_rows, kv_head * stride_kh, kv_full, keys.index(0))
        put(work.index(NUM_BLOCKS), blocks)
        put(work.index(KV_HEAD), kv_head)
        put(work.index(FIRST_KEY), k_row)
        put(work.index(NUM_KEYS), k_rows)
        mbarrier.arrive(kv_full, count=1)
        for number in range(edge_end - full_begin):
            row, rows, position, offset, is_edge = _span_in_turn(
                tile_map, num_tiles, full_begin, edge_begin, edge_end, number, ahead, BLOCK_M
            )
            for _block in range(gl.cdiv(rows, BLOCK_M)):
                inside = offsets < rows - offset
                masked = is_edge | (k_rows < keys.shape[1])
                diagonal = gl.where(masked, k_position - position - offset, UNMASKED)
                for head in range(head_begin, head_begin + group):
                    row_at = head * stride_row + row + offset + offsets
                    row_lse = gl.load(lse + row_at, mask=inside, other=float("-inf"))
                    row_delta = gl.load(delta + row_at, mask=inside, other=0.0)
                    # p is 0 in rows that do not exist and in those that saw no key
                    row_lse = gl.where(row_lse == float("-inf"), float("inf"), row_lse * LOG2E)
                    meet_if(filled >= STAGES, QUERIES_FREE + stage, ALL)
                    filled += 1
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
                        row_delta * softmax_scale if scales_early(q.dtype) else row_delta
                    )
                    put(places.index(slot), row + offset)
                    put(counts.index(slot), rows - offset)
                    put(columns.index(slot), head * stride_dqh)
                    slot += 1
                    if slot > STAGES:
                        slot = 0
                    put(diagonals.index(stage), diagonal)
                    mbarrier.arrive(q_full.index(stage), count=1)
                    stage += 1
                    if stage == STAGES:
                        stage = 0
                offset += gl.where(ahead, BLOCK_M, -BLOCK_M)
        turn += 1
        item = gl.atomic_add(counter, 1, sem="relaxed")
    mbarrier.wait(v_free, (turn & 1) ^ 1)
    mbarrier.wait(k_free, (turn & 1) ^ 1)
    put(work.index(NUM_BLOCKS), -1)
    mbarrier.arrive(kv_full, count=2)
