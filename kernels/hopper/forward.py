"""Attention forward for Hopper: the launches of kernels/forward.py, by a warp-specialised kernel.

A program stays on its multiprocessor and walks the work items. It has four warpgroups: two
consumers with 64 query rows each (forward_consumer.py), and a producer warp that drives the copy
engine (forward_producer.py; Triton fills it up to a warpgroup).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hexiseq_triton.kernels.blocks import VARYING
from hexiseq_triton.kernels.configs import num_sms
from hexiseq_triton.kernels.forms import Form, bounded_blocks
from hexiseq_triton.kernels.forward_call import ForwardCall
from hexiseq_triton.kernels.hopper import guard
from hexiseq_triton.kernels.hopper.api import gl, gluon, mbarrier, with_layout
from hexiseq_triton.kernels.hopper.counters import zero_counters
from hexiseq_triton.kernels.hopper.forward_consumer import IN_REGISTERS, consume, layout_of
from hexiseq_triton.kernels.hopper.forward_producer import (
    RECORD,
    RECORDS,
    ROWS,
    names_barriers,
    produce,
)
from hexiseq_triton.kernels.launch import Launch
from hexiseq_triton.kernels.prepared import Prepared
from hexiseq_triton.kernels.tilemap import query_tiles


@gluon.jit(do_not_specialize=VARYING)
def _forward_kernel(
    q, k, v, o, lse, out, out_tiles, sink, taken, tile_map,
    num_tiles, num_heads, heads_together, q_head_start, q_per_kv,
    scale, cap_scale, cap, left, right,
    stride_qh, stride_kh, stride_vh,
    stride_ot, stride_oh, stride_lse, stride_outt, stride_outh,
    BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    HAS_LEFT: gl.constexpr, SOFTCAP: gl.constexpr,
    FIRST: gl.constexpr, STAGED: gl.constexpr, HAS_SINK: gl.constexpr, EXACT: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = q.dtype
    queries = gl.allocate_shared_memory(DTYPE, [2, ROWS, D], q.layout)
    keys = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, D], k.layout)
    values = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, D], k.layout)
    if D <= IN_REGISTERS and not FIRST:
        staged = gl.allocate_shared_memory(gl.float32, [2, ROWS, D], layout_of(o))
    elif D <= IN_REGISTERS and STAGED:
        staged = gl.allocate_shared_memory(out_tiles.dtype, [2, ROWS, D], layout_of(out_tiles))
    else:
        staged = queries  # not read again by then
    one: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    records = gl.allocate_shared_memory(gl.int32, [RECORDS, RECORD], one)
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
            (consume, (
                0, o, lse, out, out_tiles, sink, tile_map, queries, keys, values, staged, records,
                q_full, q_free, k_full, k_free, v_full, v_free, state_full,
                num_tiles, scale, cap_scale, cap, left, right,
                stride_ot, stride_oh, stride_lse, stride_outt, stride_outh,
                BLOCK_N, D, STAGES, HAS_LEFT, SOFTCAP, FIRST, STAGED, HAS_SINK, EXACT,
            )),
            (consume, (
                1, o, lse, out, out_tiles, sink, tile_map, queries, keys, values, staged, records,
                q_full, q_free, k_full, k_free, v_full, v_free, state_full,
                num_tiles, scale, cap_scale, cap, left, right,
                stride_ot, stride_oh, stride_lse, stride_outt, stride_outh,
                BLOCK_N, D, STAGES, HAS_LEFT, SOFTCAP, FIRST, STAGED, HAS_SINK, EXACT,
            )),
            (produce, (
                q, k, v, taken, tile_map, queries, keys, values, records,
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
        blocks=[
            *loaded, state if joins else None, None, None, written if staged else None, None, None
        ],
    )  # fmt: skip
    guarded = guard.Guarded(work, "forward", q.dtype, launch.head_dim)
    # `out` by pointers and by blocks; o and lse for what is not there
    return lambda q, k, v, o, lse, out, sink=None: guarded(
        q, k, v, o, lse, out, out, lse if sink is None else sink, zero_counters(q.device)
    )


def heads_together(launch: Launch, k: Form) -> int:
    """Return how many query heads should run together, so that their keys and values fit the L2."""
    head_bytes = 2 * k.shape[0] * k.shape[2] * k.dtype.itemsize
    fit = max(1, int(L2_BYTES // head_bytes))
    groups = -(-launch.num_kv_heads // fit)
    return -(-launch.num_kv_heads // groups) * launch.heads.q_per_kv
