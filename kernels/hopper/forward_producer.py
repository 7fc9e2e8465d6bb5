"""The producer warp of the forward, and the order in which it brings queries, keys and values."""

from __future__ import annotations

from hexiseq_triton.kernels.hopper.api import gl, gluon, mbarrier, tma
from hexiseq_triton.kernels.hopper.blocks import (
    copy_rows,
    first_span,
    load_span,
    load_tile,
    num_items,
    work_item,
)
from hexiseq_triton.kernels.hopper.named import ALL, CONSUMER_AND_PRODUCER, arrive, meet_if

ROWS = gl.constexpr(64)
"""Query rows of a consumer."""
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
def produce(
    q, k, v, tile_map, queries, keys, values, q_full, q_free, k_full, k_free, v_full, v_free,
    num_tiles, num_heads, heads_together, q_head_start, q_per_kv,
    stride_qh, stride_kh, stride_vh,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, NAMED: gl.constexpr,
):  # fmt: skip
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    at = 0
    for turn in range(num_items(num_tiles * num_heads, programs, program)):
        tile, head = work_item(turn, programs, program, num_tiles, num_heads, heads_together)
        row, _rows, _position, full_begin, edge_begin, edge_end = load_tile(tile_map, tile)
        kv_head = (q_head_start + head) // q_per_kv - q_head_start // q_per_kv
        k_column = kv_head * stride_kh
        v_column = kv_head * stride_vh
        for w in gl.static_range(2):
            _wait_until_free(QUERIES_FREE, w, turn, q_free, CONSUMER_AND_PRODUCER, NAMED)
            mbarrier.expect(q_full.index(w), q.block_type.nbytes)
            tma.async_copy_global_to_shared(
                q, [row + w * ROWS, head * stride_qh], q_full.index(w), queries.index(w)
            )
        k_row, k_rows, _position = first_span(tile_map, num_tiles, full_begin, edge_begin, edge_end)
        _load_keys(
            k, v, keys, values, k_full, k_free, v_full, v_free,
            k_row, k_rows, k_column, v_column, at, STAGES, NAMED,
        )  # fmt: skip
        at += 1
        # of this span the first block is there; not a variable that loops carry: see the traps
        first = gl.where(edge_begin < edge_end, edge_begin, full_begin)
        for span in range(edge_begin, edge_end):
            k_row, k_rows, _position = load_span(tile_map, num_tiles, span)
            for offset in range(gl.where(span == first, BLOCK_N, 0), k_rows, BLOCK_N):
                _load_keys(
                    k, v, keys, values, k_full, k_free, v_full, v_free,
                    k_row + offset, k_rows - offset, k_column, v_column, at, STAGES, NAMED,
                )  # fmt: skip
                at += 1
        for span in range(full_begin, edge_begin):
            k_row, k_rows, _position = load_span(tile_map, num_tiles, span)
            for offset in range(gl.where(span == first, BLOCK_N, 0), k_rows, BLOCK_N):
                _load_keys(
                    k, v, keys, values, k_full, k_free, v_full, v_free,
                    k_row + offset, k_rows - offset, k_column, v_column, at, STAGES, NAMED,
                )  # fmt: skip
                at += 1
