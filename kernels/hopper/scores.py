"""From scores to probabilities, transposed, as the backward computes them anew.

Rows are keys and columns queries, in the layout of a product of one warpgroup.
"""

from __future__ import annotations

from hexiseq_triton.kernels.hopper.api import gl, gluon
from hexiseq_triton.kernels.hopper.blocks import by_thread, capped, thread_columns
from hexiseq_triton.kernels.hopper.producer import UNMASKED

_FAR = gl.constexpr(1 << 30)  # past every position


@gluon.jit
def probabilities(
    s, lse, diagonal, first_key, num_keys, scale, cap_scale, cap, left, right,
    DTYPE: gl.constexpr,
    HAS_LEFT: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Return p and what stands for p in ds, in DTYPE: p again, or with a softcap p times its slope.

    Args:
        s: products k q^T, [N, M] float32.
        lse: of the M queries in base 2, +inf for rows that see nothing or do not exist.
        diagonal: position of the tile's first key less that of the block's first query, or
            UNMASKED.
        first_key: index in the tile of the first of these N keys.
        num_keys: keys that the tile has.
        scale, cap_scale, cap, left, right: as `Launch.scalars` gives them.
    """
    # of a pair that does not see each other: no probability, or a capped score that gives none
    UNSEEN: gl.constexpr = -1e10 if SOFTCAP else 0.0
    s = capped(s, cap_scale) if SOFTCAP else gl.exp2(s * scale - lse[None, :])
    if diagonal != UNMASKED:
        key = first_key + gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))
        low = diagonal + key - right
        high = key * 0 + s.shape[1]
        if HAS_LEFT:
            high = diagonal + key + left
        s = seen_only(s, gl.where(key < num_keys, low, _FAR), high, UNSEEN, HAS_LEFT)
    if SOFTCAP:
        p = gl.exp2(s * (cap * scale) - lse[None, :])
        weight = (p * (1.0 - s * s)).to(DTYPE)
        p = p.to(DTYPE)
    else:
        p = s.to(DTYPE)
        weight = p
    return p, weight


@gluon.jit
def seen_only(s, low, high, UNSEEN: gl.constexpr, HAS_LEFT: gl.constexpr):
    """Return s [N, M], UNSEEN but where a query's index in the block is in [low, high]."""
    x = by_thread(s)
    XL: gl.constexpr = x.type.layout
    RL: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, XL)))
    known, lane = thread_columns(s.shape[1], XL)
    first = gl.convert_layout(low, RL, assert_trivial=True)[:, None, None, None]
    seen = known >= first - lane
    if HAS_LEFT:
        last = gl.convert_layout(high, RL, assert_trivial=True)[:, None, None, None]
        seen = seen & (known <= last - lane)
    x = gl.where(seen, x, UNSEEN)
    return gl.convert_layout(x.reshape(s.shape), s.type.layout, assert_trivial=True)


@gluon.jit
def unpacked(x):
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
