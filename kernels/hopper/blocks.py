"""What the Hopper kernels share: order of work, reading the tile map, softmax pieces, layouts.

Each is the Gluon twin of a function in kernels/blocks.py, or exists for the compiler's sake.
"""

from __future__ import annotations

from hexiseq_triton.kernels.forms import BOUND
from hexiseq_triton.kernels.hopper.api import gl, gluon, tma
from hexiseq_triton.kernels.tilemap import SPAN_FIELDS, TILE_FIELDS

_TILE_FIELDS = gl.constexpr(TILE_FIELDS)
_SPAN_FIELDS = gl.constexpr(SPAN_FIELDS)
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-1e38)  # finite, so that differences of two such maxima are no NaN
_BOUND = gl.constexpr(BOUND)


@gluon.jit
def num_items(total, programs, program):
    """Return how many of `total` work items fall to this program."""
    rounds = total // programs
    place = gl.where(rounds % 2 == 0, program, programs - 1 - program)
    return rounds + gl.where(place < total - rounds * programs, 1, 0)


@gluon.jit
def work_item(turn, programs, program, num_tiles, num_heads, heads_together):
    """Return (tile, head) of this program's item number `turn`.

    Programs walk the items in snake order: forwards and backwards in turn. `heads_together` heads
    form a group, whose keys and values fit the L2 cache; groups run from heavy to light tiles and
    from light to heavy in turn, the last one from heavy to light, so that no program gets a
    heavy tile of one group while the others get light ones of another.
    """
    item = turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)
    group_items = num_tiles * heads_together
    group = item // group_items
    rest = item - group * group_items
    heads = gl.minimum(heads_together, num_heads - group * heads_together)
    place = rest // heads
    from_heavy = (gl.cdiv(num_heads, heads_together) - group) % 2 == 1
    tile = gl.where(from_heavy, place, num_tiles - 1 - place)
    return tile, group * heads_together + rest - place * heads


@gluon.jit
def load_tile(tile_map, tile):
    """Return row, num_rows, position and the three borders of the full and the edge spans."""
    at = tile_map + tile * _TILE_FIELDS
    row = gl.load(at)
    num_rows = gl.load(at + 1)
    position = gl.load(at + 2)
    full_begin = gl.load(at + 3)
    edge_begin = gl.load(at + 4)
    edge_end = gl.load(at + 5)
    return row, num_rows, position, full_begin, edge_begin, edge_end


@gluon.jit
def load_span(tile_map, num_tiles, span):
    """Return row, num_rows and position of a span."""
    at = tile_map + num_tiles * _TILE_FIELDS + span * _SPAN_FIELDS
    return gl.load(at), gl.load(at + 1), gl.load(at + 2)


@gluon.jit
def load_span_unless(known, row, num_rows, position, tile_map, num_tiles, span):
    """Return load_span, or the three numbers given where they are `known`, without a load."""
    at = tile_map + num_tiles * _TILE_FIELDS + span * _SPAN_FIELDS
    row = gl.load(at, mask=not known, other=row)
    num_rows = gl.load(at + 1, mask=not known, other=num_rows)
    position = gl.load(at + 2, mask=not known, other=position)
    return row, num_rows, position


@gluon.jit
def bounded_at(bounded, row, num_rows, column):
    """Return where a descriptor of `bounded_blocks` finds rows [row, row + num_rows) of a block;
    past them it reads zeros, and writes nothing."""
    rows = gl.minimum(num_rows, bounded.block_shape[2])
    return [_BOUND, row + rows, _BOUND - rows, column]


@gluon.jit
def four_dimensional(place, bounded):
    """Return a block in shared memory with the shape that `bounded` has."""
    return place._reinterpret(place.dtype, bounded.block_shape, bounded.layout)


@gluon.jit
def copy_rows(bounded, row, num_rows, column, full, place):
    """Let the copy engine bring rows [row, row + num_rows), and zeros up to a whole block."""
    tma.async_copy_global_to_shared(
        bounded, bounded_at(bounded, row, num_rows, column), full, four_dimensional(place, bounded)
    )


@gluon.jit
def get(place):
    """Return a number from shared memory, in each thread of a warp or warpgroup."""
    return gl.sum(place.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def key_range(q_position, left, right, HAS_LEFT: gl.constexpr):
    """Return the first and the last key position that each query sees."""
    low = q_position
    if HAS_LEFT:
        low = q_position - left
    return low, q_position + right


@gluon.jit
def by_thread(x):
    """[M, N] -> [M, N/8, 4, 2] without moving anything: the second and the last dimension number
    a thread's own registers, the third the four threads that share a row."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    return x.reshape([M, N // 8, 4, 2])


@gluon.jit
def thread_columns(N: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the columns of by_thread(x) in two parts that broadcast: [1, N/8, 1, 2] known when
    compiling, [1, 1, 4, 1] not. Kept apart, the known part goes into the instructions."""
    LJ: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
    LT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT)))
    LC: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    j = gl.arange(0, N // 8, LJ)[None, :, None, None]
    t = gl.arange(0, 4, LT)[None, None, :, None]
    c = gl.arange(0, 2, LC)[None, None, None, :]
    return 8 * j + c, 2 * t


@gluon.jit
def _row_pointers(base, row, num_rows, head, stride_row, stride_head, x):
    """Return pointers to by_thread(x), rows [row, row + M) of one head, and which rows exist."""
    XL: gl.constexpr = x.type.layout
    RL: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, XL)))
    known, lane = thread_columns(x.shape[1] * 8, XL)
    rows = gl.arange(0, x.shape[0], RL)[:, None, None, None]
    start = base + row.to(gl.int64) * stride_row + head.to(gl.int64) * stride_head
    return start + rows * stride_row + lane + known, rows < num_rows


@gluon.jit
def load_rows(base, row, num_rows, head, stride_row, stride_head, like):
    """Return rows [row, row + M) of one head with the shape and layout of `like`; 0 where there
    are none."""
    pointers, inside = _row_pointers(
        base, row, num_rows, head, stride_row, stride_head, by_thread(like)
    )
    x = gl.load(pointers, mask=inside, other=0.0).reshape(like.shape)
    return gl.convert_layout(x, like.type.layout, assert_trivial=True)


@gluon.jit
def add_rows(
    acc, weight, base, row, num_rows, head, stride_row, stride_head, FIRST: gl.constexpr
):  # fmt: skip
    """Return acc [M, W] + weight [M] * columns [FIRST, FIRST + W) of rows [row, row + M).

    By the half, down to 64 columns: what is loaded at once must fit the registers beside acc.
    """
    M: gl.constexpr = acc.shape[0]
    W: gl.constexpr = acc.shape[1]
    L: gl.constexpr = acc.type.layout
    if W > 64:
        left, right = acc.reshape([M, 2, W // 2]).permute((0, 2, 1)).split()
        left = add_rows(left, weight, base, row, num_rows, head, stride_row, stride_head, FIRST)
        right = add_rows(
            right, weight, base, row, num_rows, head, stride_row, stride_head, FIRST + W // 2
        )  # fmt: skip
        acc = gl.join(left, right).permute((0, 2, 1)).reshape([M, W])
        return gl.convert_layout(acc, L, assert_trivial=True)
    else:
        old = load_rows(base + FIRST, row, num_rows, head, stride_row, stride_head, acc)
        RL: gl.constexpr = gl.SliceLayout(1, L)
        wide = gl.convert_layout(weight, RL, assert_trivial=True)[:, None]
        return acc + old * wide


@gluon.constexpr_function
def _in_pieces(rows, columns):
    """Return a layout in which a thread has 8 columns in a row, and every value is in the warp
    where products leave it."""
    registers = [[0, 1], [0, 2], [0, 4]]
    registers += [[0, 32 << i] for i in range((columns // 32).bit_length() - 1)]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        [*registers, [8, 0]], lanes, [[16, 0], [32, 0]], [], [rows, columns]
    )


@gluon.jit
def store_rows(base, x, row, num_rows, head, stride_row, stride_head, PIECES: gl.constexpr):
    """Store the first `num_rows` rows of x [64, D] straight from its registers.

    Of 16-bit numbers four threads then write 16 bytes of a row, half of the least that memory
    takes. With PIECES each thread writes as much; the numbers meet in 2 KB of shared memory.
    """
    DTYPE: gl.constexpr = base.dtype.element_ty
    if PIECES and DTYPE.primitive_bitwidth == 16:
        L: gl.constexpr = _in_pieces(x.shape[0], x.shape[1])
        rows = gl.arange(0, x.shape[0], gl.SliceLayout(1, L))[:, None]
        columns = gl.arange(0, x.shape[1], gl.SliceLayout(0, L))[None, :]
        start = base + row.to(gl.int64) * stride_row + head.to(gl.int64) * stride_head
        pieces = gl.convert_layout(x.to(DTYPE), L)
        gl.store(start + rows * stride_row + columns, pieces, mask=rows < num_rows)
    else:
        x = by_thread(x)
        pointers, inside = _row_pointers(base, row, num_rows, head, stride_row, stride_head, x)
        gl.store(pointers, x.to(DTYPE), mask=inside)


@gluon.jit
def capped(products, cap_scale):
    """Return tanh(products * cap_scale)."""
    return 1.0 - 2.0 / (1.0 + gl.exp2(products * (2.0 * LOG2E * cap_scale)))


@gluon.jit
def packed(p, DTYPE: gl.constexpr):
    """Convert float32 to 2-byte floats, two in a register.

    By PTX: values that live across a loop's edge would otherwise be packed anew in each step.
    """
    if gl.bfloat16 == DTYPE:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [p], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [p], dtype=gl.float16, is_pure=True, pack=2
        )
