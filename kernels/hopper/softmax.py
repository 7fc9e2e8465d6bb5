"""Online softmax in registers, for a warpgroup that holds 64 rows of scores.

Row maxima may stay up to LAZY (in base 2) too small: the probabilities then reach 2^LAZY, which
bf16, fp16 and float32 sums hold without loss, and most steps need not rescale the accumulator.
"""

from __future__ import annotations

from hexiseq_triton.kernels.hopper.api import gl, gluon
from hexiseq_triton.kernels.hopper.blocks import packed

LAZY = gl.constexpr(8.0)


@gluon.jit
def _fold_max(s):
    """[M, N] -> [M, N/2], maxima of the two halves: independent instructions, no long chain."""
    M: gl.constexpr = s.shape[0]
    N: gl.constexpr = s.shape[1]
    x, y = s.reshape([M, 2, N // 2]).permute((0, 2, 1)).split()
    return gl.maximum(x, y)


@gluon.jit
def row_max(s):
    """Return the maximum of each row, [M]."""
    RL: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    return gl.convert_layout(gl.max(_fold_max(_fold_max(s)), 1), RL)


@gluon.jit
def quad_sum(p):
    """[M, N] -> [M, 4]: each of the four threads that share a row adds its own columns."""
    M: gl.constexpr = p.shape[0]
    N: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(p.reshape([M, N // 8, 4, 2]), 3), 1)


@gluon.jit
def softmax_step(s, m, total, scale, DTYPE: gl.constexpr):
    """Return p in DTYPE, the factor for what was summed so far, and the new m and total.

    m [M] is in base 2, total [M, 4] holds the sums of four threads.
    """
    candidate = row_max(s) * scale
    m_new = gl.where(candidate > m + LAZY, candidate, m)
    factor = gl.exp2(m - m_new)
    p = gl.exp2(s * scale - m_new[:, None])
    TL: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    wide = gl.convert_layout(factor, TL, assert_trivial=True)[:, None]
    return packed(p, DTYPE), factor, m_new, total * wide + quad_sum(p)


def _rescale_ptx(n: int) -> str:
    """Return PTX that multiplies n registers by their row's factor, unless all in the warp are 1.

    In a 64-row accumulator register e belongs to the thread's upper row if bit 1 of e is clear,
    else to its lower row. Operands: $0.. accumulators (in and out), $2n.. the factors.
    """
    upper, lower = 2 * n, 2 * n + 2
    products = " ".join(f"mul.f32 ${e}, ${e}, ${lower if e & 2 else upper};" for e in range(n))
    return (
        f"{{ .reg .pred p, q; setp.neu.f32 p, ${upper}, 0f3F800000; "
        f"setp.neu.or.f32 p, ${lower}, 0f3F800000, p; vote.sync.any.pred q, p, 0xffffffff; "
        f"@!q bra.uni DONE; {products} DONE: }}"
    )


def _rescale_constraints(n: int) -> str:
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


_PTX_64 = gl.constexpr(_rescale_ptx(32))
_CONSTRAINTS_64 = gl.constexpr(_rescale_constraints(32))
_PTX_128 = gl.constexpr(_rescale_ptx(64))
_CONSTRAINTS_128 = gl.constexpr(_rescale_constraints(64))


@gluon.jit
def rescale(acc, factor):
    """Return acc [64, D] * factor[:, None]; a warp whose factors are all 1 skips the products."""
    D: gl.constexpr = acc.shape[1]
    RL: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    wide = gl.convert_layout(factor, RL, assert_trivial=True)[:, None]
    if D == 64:
        return gl.inline_asm_elementwise(
            _PTX_64, _CONSTRAINTS_64, [acc, wide], dtype=gl.float32, is_pure=False, pack=32
        )
    elif D == 128:
        return gl.inline_asm_elementwise(
            _PTX_128, _CONSTRAINTS_128, [acc, wide], dtype=gl.float32, is_pure=False, pack=64
        )
    else:
        return acc * wide
