"""The producer warp of the forward, and the order in which it brings queries, keys and values."""

from __future__ import annotations

from hexiseq_triton.kernels.hopper.api import gl, gluon, mbarrier, tma
from hexiseq_triton.kernels.hopper.blocks import (
    copy_rows,
    get,
    load_span_unless,
    work_item,
)
from hexiseq_triton.kernels.hopper.named import ALL, CONSUMER_AND_PRODUCER, arrive, meet_if
from hexiseq_triton.kernels.hopper.stealing import count_item, take_item
from hexiseq_triton.kernels.tilemap import TILE_FIELDS

ROWS = gl.constexpr(64)
"""Query rows of a consumer."""
_TILE_FIELDS = gl.constexpr(TILE_FIELDS)
ROW = gl.constexpr(0)
"""Where the record of a tile has its numbers: the fields of the tile map, and the head."""
NUM_ROWS = gl.constexpr(1)
POSITION = gl.constexpr(2)
FULL_BEGIN = gl.constexpr(3)
EDGE_BEGIN = gl.constexpr(4)
EDGE_END = gl.constexpr(5)
FIRST_ROW = gl.constexpr(6)
FIRST_ROWS = gl.constexpr(7)
FIRST_POSITION = gl.constexpr(8)
FULL_ROW = gl.constexpr(9)
FIRST_FULL_ROWS = gl.constexpr(10)
FULL_ROWS = gl.constexpr(11)
HEAD = gl.constexpr(TILE_FIELDS)
RECORD = gl.constexpr(32)
"""Numbers of a record, one for each thread of the warp that writes it."""
RECORDS = gl.constexpr(4)
"""Records that are kept. When one is written, both consumers are done with the tile before the
last: with three, a number may be read as late as at its tile's end. Four are a mask away."""
KEYS_FREE = gl.constexpr(10)
"""The named barriers of the two stages of keys; 8 and 9 are the consumers' turns."""
VALUES_FREE = gl.constexpr(12)
QUERIES_FREE = gl.constexpr(14)
"""Those of the queries of either consumer."""


@gluon.constexpr_function
def names_barriers(head_dim):
    """Return whether consumers give their buffers back at named barriers. At 64, where a step is
    shortest, it is faster to let the warps meet as often as mbarriers make them."""
    return head_dim > 64


@gluon.jit
def give_back(barrier: gl.constexpr, at, free, THREADS: gl.constexpr, NAMED: gl.constexpr):
    """Let the producer fill a buffer again, as far as this consumer is concerned."""
    if NAMED:
        arrive(barrier + at, THREADS)
    else:
        mbarrier.arrive(free.index(at), count=1)


@gluon.jit
def _wait_until_free(
    barrier: gl.constexpr, at, turn, free, THREADS: gl.constexpr, NAMED: gl.constexpr
):
    """Wait until a buffer that was filled `turn` times has been given back as often."""
    if NAMED:
        meet_if(turn > 0, barrier + at, THREADS)
    else:
        mbarrier.wait(free.index(at), (turn & 1) ^ 1)


@gluon.jit
def _load_keys(
    k, v, keys, values, k_full, k_free, v_full, v_free, row, num_rows, k_column, v_column, at,
    STAGES: gl.constexpr, NAMED: gl.constexpr,
):  # fmt: skip
    """Copy keys and values [row, row + BLOCK_N) of one head into stage `at % STAGES`.

    Only values must stop at `num_rows`: scores of keys that are none are replaced.
    """
    stage = at % STAGES
    turn = at // STAGES
    _wait_until_free(KEYS_FREE, stage, turn, k_free, ALL, NAMED)
    mbarrier.expect(k_full.index(stage), k.block_type.nbytes)
    tma.async_copy_global_to_shared(k, [row, k_column], k_full.index(stage), keys.index(stage))
    _wait_until_free(VALUES_FREE, stage, turn, v_free, ALL, NAMED)
    mbarrier.expect(v_full.index(stage), v.block_type.nbytes)
    copy_rows(v, row, num_rows, v_column, v_full.index(stage), values.index(stage))


@gluon.jit
def _record_tile(records, turn, owner, number, tile_map, num_tiles, num_heads, heads_together):
    """Put down for `tile_number` what this program's tile number `turn` is about: item `number` of
    the list of `owner`, or a tile without rows where that is negative."""
    tile, head = work_item(number, gl.num_programs(0), owner, num_tiles, num_heads, heads_together)
    fields = gl.arange(0, RECORD, gl.BlockedLayout([1], [32], [1], [0]))
    inside = (fields < _TILE_FIELDS) & (number >= 0)
    numbers = gl.load(tile_map + tile * _TILE_FIELDS + fields, mask=inside, other=0)
    head = gl.where(number >= 0, head, 0)
    records.index(turn % RECORDS).store(gl.where(fields == HEAD, head, numbers))


@gluon.jit
def tile_number(records, turn, FIELD: gl.constexpr):
    """Return a number of the program's tile number `turn`."""
    return get(records.index(turn % RECORDS).slice(FIELD, 1))


@gluon.jit
def produce(
    q, k, v, taken, tile_map, queries, keys, values, records,
    q_full, q_free, k_full, k_free, v_full, v_free,
    num_tiles, num_heads, heads_together, q_head_start, q_per_kv,
    stride_qh, stride_kh, stride_vh,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, NAMED: gl.constexpr,
):  # fmt: skip
    total = num_tiles * num_heads
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    count = count_item(taken, program)
    _record_tile(records, 0, program, 0, tile_map, num_tiles, num_heads, heads_together)
    if count > 0:  # this program began late, and others have begun its list
        owner, number = take_item(count, taken, total, programs, program)
        _record_tile(records, 0, owner, number, tile_map, num_tiles, num_heads, heads_together)
    at = 0
    turn = 0
    rows = 1  # as in the consumers
    while rows > 0:
        row = tile_number(records, turn, ROW)
        head = tile_number(records, turn, HEAD)
        kv_head = (q_head_start + head) // q_per_kv - q_head_start // q_per_kv
        k_column = kv_head * stride_kh
        v_column = kv_head * stride_vh
        for w in gl.static_range(2):
            _wait_until_free(QUERIES_FREE, w, turn, q_free, CONSUMER_AND_PRODUCER, NAMED)
            mbarrier.expect(q_full.index(w), q.block_type.nbytes)
            tma.async_copy_global_to_shared(
                q, [row + w * ROWS, head * stride_qh], q_full.index(w), queries.index(w)
            )
        first_row = tile_number(records, turn, FIRST_ROW)
        first_rows = tile_number(records, turn, FIRST_ROWS)
        _load_keys(
            k, v, keys, values, k_full, k_free, v_full, v_free,
            first_row, first_rows, k_column, v_column, at, STAGES, NAMED,
        )  # fmt: skip
        at += 1
        # now, when the next keys are not needed soon
        count = count_item(taken, program)
        owner, number = take_item(count, taken, total, programs, program)
        _record_tile(
            records, turn + 1, owner, number, tile_map, num_tiles, num_heads, heads_together
        )
        full_begin = tile_number(records, turn, FULL_BEGIN)
        edge_begin = tile_number(records, turn, EDGE_BEGIN)
        edge_end = tile_number(records, turn, EDGE_END)
        # of this span the first block is there; not a variable that loops carry: see the traps
        first = gl.where(edge_begin < edge_end, edge_begin, full_begin)
        for span in range(edge_begin, edge_end):
            k_row, k_rows, _position = load_span_unless(
                span == first, first_row, first_rows, 0, tile_map, num_tiles, span
            )
            for offset in range(gl.where(span == first, BLOCK_N, 0), k_rows, BLOCK_N):
                _load_keys(
                    k, v, keys, values, k_full, k_free, v_full, v_free,
                    k_row + offset, k_rows - offset, k_column, v_column, at, STAGES, NAMED,
                )  # fmt: skip
                at += 1
        full_row = tile_number(records, turn, FULL_ROW)
        full_rows = tile_number(records, turn, FIRST_FULL_ROWS)
        for span in range(full_begin, edge_begin):
            k_row, k_rows, _position = load_span_unless(
                span == full_begin, full_row, full_rows, 0, tile_map, num_tiles, span
            )
            for offset in range(gl.where(span == first, BLOCK_N, 0), k_rows, BLOCK_N):
                _load_keys(
                    k, v, keys, values, k_full, k_free, v_full, v_free,
                    k_row + offset, k_rows - offset, k_column, v_column, at, STAGES, NAMED,
                )  # fmt: skip
                at += 1
        turn += 1
        rows = tile_number(records, turn, NUM_ROWS)
    for w in gl.static_range(2):  # the consumers find a tile without rows, and end
        _wait_until_free(QUERIES_FREE, w, turn, q_free, CONSUMER_AND_PRODUCER, NAMED)
        mbarrier.arrive(q_full.index(w), count=1)
