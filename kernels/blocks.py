"""What the attention kernels share: work items, block loads, dot products, the mask.

A *tile* is the block of rows that one program works on, a *span* a run of rows on the other side
that the tile meets (see tilemap.py). Row bases are int64 scalars, offsets inside a block int32
and invariant in the loops: pointer loads stay asynchronous copies, and views may pass 2**31
elements. With DESCRIPTORS the same loads go through tensor descriptors (TMA), for which all heads
of a tensor are columns of one matrix; those of four dimensions are bounded (see forms.py).

Rows that a block asks for beyond its span belong to others, and may hold NaN, which no mask takes
out of a product: 0 NaN = NaN. Pointers and bounded descriptors give zeros there, plain descriptors
what is in memory.
"""

import triton
import triton.language as tl

from hexiseq_triton.kernels.forms import BOUND
from hexiseq_triton.kernels.tilemap import SPAN_FIELDS, TILE_FIELDS

_BOUND = tl.constexpr(BOUND)
_TILE_FIELDS = tl.constexpr(TILE_FIELDS)
_SPAN_FIELDS = tl.constexpr(SPAN_FIELDS)

VARYING = ["num_tiles", "num_heads", "heads_together", "q_head_start", "q_per_kv", "left", "right"]
"""Kernel arguments that change from call to call: their values must not cause recompilation."""

LOG2E = tl.constexpr(1.4426950408889634)
_FAR = tl.constexpr(1 << 30)  # past every position
NOWHERE = tl.constexpr((1 << 31) - 1)  # the position of a key that does not exist
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def work_item(step, num_tiles, num_heads, heads_together):
    """Return (tile, head) of this program's work at grid-stride index `step`.

    Programs walk the items in snake order, so that each gets as many heavy tiles as light ones.
    `heads_together` heads go through all tiles, heaviest first, before the next heads begin:
    what these heads read should fit the L2 cache.
    """
    programs = tl.num_programs(0)
    turn = step // programs
    place = step % programs
    last = tl.minimum(programs, num_tiles * num_heads - turn * programs) - 1
    item = turn * programs + tl.where(turn % 2 == 1, last - place, place)

    first_head = item // (num_tiles * heads_together) * heads_together
    heads = tl.minimum(heads_together, num_heads - first_head)
    rest = item - first_head * num_tiles
    return rest // heads, first_head + rest % heads


@triton.jit
def load_tile(tile_map, tile):
    """Return row, num_rows, position and the three borders of the full and the edge spans."""
    at = tile_map + tile * _TILE_FIELDS
    row = tl.load(at)
    num_rows = tl.load(at + 1)
    position = tl.load(at + 2)
    full_begin = tl.load(at + 3)
    edge_begin = tl.load(at + 4)
    edge_end = tl.load(at + 5)
    return row, num_rows, position, full_begin, edge_begin, edge_end


@triton.jit
def load_span(tile_map, num_tiles, span):
    """Return row, num_rows and position of a span."""
    at = tile_map + num_tiles * _TILE_FIELDS + span * _SPAN_FIELDS
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def block_pointers(base, row, head, stride_row, stride_head, ROWS: tl.constexpr, D: tl.constexpr):
    """Return pointers to rows [row, row + ROWS) of one head, [ROWS, D]."""
    start = base + row.to(tl.int64) * stride_row + head.to(tl.int64) * stride_head
    return start + (tl.arange(0, ROWS)[:, None] * stride_row + tl.arange(0, D)[None, :])


@triton.jit
def load_block(
    source, row, num_rows, head, stride_row, stride_head,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    ALL_ROWS: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Return rows [row, row + ROWS) of one head, [ROWS, D].

    Unless ALL_ROWS, those from `num_rows` on are 0, or anything if `source` is a plain descriptor.
    """
    if DESCRIPTORS and len(source.block_shape) == 2:
        block = source.load([row, head * stride_head])
    elif DESCRIPTORS:
        readable = num_rows
        if ALL_ROWS:
            readable = ROWS
        at = [_BOUND, row + readable, _BOUND - readable, head * stride_head]
        block = source.load(at).reshape(ROWS, D)
    else:
        pointers = block_pointers(source, row, head, stride_row, stride_head, ROWS, D)
        in_rows = tl.arange(0, ROWS)[:, None] < num_rows
        in_columns = tl.arange(0, D)[None, :] < HEAD_DIM
        if ALL_ROWS and HEAD_DIM == D:
            block = tl.load(pointers)
        elif ALL_ROWS:
            block = tl.load(pointers, mask=in_columns, other=0.0)
        elif HEAD_DIM == D:
            block = tl.load(pointers, mask=in_rows, other=0.0)
        else:
            block = tl.load(pointers, mask=in_rows & in_columns, other=0.0)
    return block


@triton.jit
def store_block(
    target, block, row, num_rows, head, stride_row, stride_head,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """Store the first `num_rows` rows of `block` [ROWS, D], or add them to what is there."""
    pointers = block_pointers(target, row, head, stride_row, stride_head, ROWS, D)
    inside = tl.arange(0, ROWS)[:, None] < num_rows
    if HEAD_DIM < D:
        inside = inside & (tl.arange(0, D)[None, :] < HEAD_DIM)
    if ACCUMULATE:
        # nobody else adds to these elements; a reduction just needs no registers for what is there
        tl.atomic_add(pointers, block, mask=inside, sem="relaxed")
    else:
        tl.store(pointers, block.to(target.dtype.element_ty), mask=inside)


@triton.jit
def dot(a, b, acc, UPCAST: tl.constexpr):
    """Return a @ b + acc in float32. UPCAST is for the interpreter, whose bf16 dot is wrong."""
    if a.dtype == tl.float32:
        acc += product(a, b, UPCAST)
    elif UPCAST:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def product(a, b, UPCAST: tl.constexpr):
    """Return a @ b in float32.

    Inputs of float32 are summed in float64: a chain of D roundings in float32 errs several times
    more than plain torch does, above all in dp - delta, which nearly cancels where p is near 1.
    """
    if a.dtype == tl.float32:
        result = tl.dot(a.to(tl.float64), b.to(tl.float64), out_dtype=tl.float64).to(tl.float32)
    elif UPCAST:
        result = tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        result = tl.dot(a, b)
    return result


@triton.jit
def key_range(q_position, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Return the first and the last key position that each query sees."""
    low = q_position
    high = q_position * 0 + _FAR
    if HAS_LEFT:
        low = q_position - left
    if HAS_RIGHT:
        high = q_position + right
    return low, high


@triton.jit
def visible(k_position, low, high, HAS_LEFT: tl.constexpr):
    """Return which scores count: one comparison each, two with a window."""
    seen = k_position <= high
    if HAS_LEFT:
        seen = seen & (k_position >= low)
    return seen


@triton.jit
def capped(products, cap_scale, DTYPE: tl.constexpr):
    """Return tanh(products * cap_scale) in float32.

    Its error of 1e-7 counts where products of DTYPE are more precise than that, times a large cap.
    """
    if tl.float32 == DTYPE:
        products = products.to(tl.float64)
    tanh = 1.0 - 2.0 / (1.0 + tl.exp2(products * (2.0 * LOG2E * cap_scale)))
    return tanh.to(tl.float32)
