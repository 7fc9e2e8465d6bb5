"""Online softmax in registers, for a warpgroup that holds 64 rows of scores.

A row's m only has to keep exponentials in range, so it need not be the exact maximum. Steps begin
with the m they find, look at the sums that come out, and take the exact maxima only where a sum is
beyond 2^15: seldom after a tile's first block. All others save the search for the maxima, with its
wait for other threads, and need not scale what was summed before.

m and total are [64, 4]: one value for each row and each of the four threads that share it. m is in
base 2 and the same in the four; total holds the sums of a thread's own columns.
"""

from __future__ import annotations

from hexiseq_triton.kernels.hopper.api import gl, gluon
from hexiseq_triton.kernels.hopper.blocks import LOWEST, by_thread, packed
from hexiseq_triton.kernels.hopper.softmax_ptx import step_constraints, step_ptx

_STEPS = gl.constexpr(
    {
        (n, pair, in_halves): (step_ptx(n, pair, in_halves), step_constraints(n))
        for n in (32, 64)
        for pair in ("bf16x2", "f16x2")
        for in_halves in (False, True)
    }
)


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
def _by_quad(x, like):
    """[M] -> [M, 4] with the layout of `like`."""
    TL: gl.constexpr = gl.SliceLayout(1, like.type.layout)
    return gl.convert_layout(x, TL, assert_trivial=True)[:, None] + gl.zeros_like(like)


@gluon.jit
def _first_of_quad(x, like):
    """[M, N] -> [M, 4]: the first value of each row that a thread holds."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    if N > 8:
        x, _rest = x.reshape([M, 2, N // 2]).permute((0, 2, 1)).split()
        return _first_of_quad(x, like)
    else:
        x, _rest = x.reshape([M, 4, 2]).split()
        return gl.convert_layout(x, like.type.layout, assert_trivial=True)


@gluon.jit
def _by_column(x, like):
    """[M, 4] -> [M, N] like `like`: a thread's value for each of its columns in the row."""
    X: gl.constexpr = by_thread(like).type.layout
    x = gl.convert_layout(x, gl.SliceLayout(1, gl.SliceLayout(3, X)), assert_trivial=True)
    wide = x[:, None, :, None] + gl.zeros_like(by_thread(like))
    return gl.convert_layout(wide.reshape(like.shape), like.type.layout, assert_trivial=True)


@gluon.jit
def first_step(s, scale, DTYPE: gl.constexpr):
    """Return p in DTYPE, m and total of the first scores [64, N]."""
    m = gl.maximum(row_max(s) * scale, LOWEST)
    p = gl.exp2(s * scale - m[:, None])
    total = quad_sum(p)
    return packed(p, DTYPE), _by_quad(m, total), total


@gluon.jit
def softmax_step(
    s, m, total, scale,
    DTYPE: gl.constexpr, EXACT: gl.constexpr, IN_HALVES: gl.constexpr,
):  # fmt: skip
    """Return p in DTYPE, the factor for what was summed so far, and the new m and total.

    EXACT: m is to be the exact maximum. IN_HALVES: takes 16 registers less, and a little longer.
    """
    if EXACT:
        return _exact_step(s, m, total, scale, DTYPE)
    else:
        return _lazy_step(s, m, total, scale, DTYPE, IN_HALVES)


@gluon.jit
def _exact_step(s, m, total, scale, DTYPE: gl.constexpr):
    old = gl.convert_layout(gl.max(m, 1), gl.SliceLayout(1, s.type.layout))
    new = gl.maximum(row_max(s) * scale, old)
    p = gl.exp2(s * scale - new[:, None])
    factor = _by_quad(gl.exp2(old - new), total)
    return packed(p, DTYPE), factor, _by_quad(new, total), total * factor + quad_sum(p)


@gluon.constexpr_function
def _step(scores, dtype, in_halves):
    """Return PTX and constraints of a step of a warpgroup over [64, scores]."""
    pair = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    return _STEPS.value[(scores // 2, pair, in_halves)]


@gluon.jit
def _lazy_step(s, m, total, scale, DTYPE: gl.constexpr, IN_HALVES: gl.constexpr):
    STEP: gl.constexpr = _step(s.shape[1], DTYPE, IN_HALVES)
    arguments = [s, _by_column(m, s), _by_column(total, s), scale]
    if gl.bfloat16 == DTYPE:
        p, m, factor, total_by_column = gl.inline_asm_elementwise(
            STEP[0], STEP[1], arguments, is_pure=False, pack=s.shape[1] // 2,
            dtype=(gl.bfloat16, gl.float32, gl.float32, gl.float32),
        )  # fmt: skip
    else:
        p, m, factor, total_by_column = gl.inline_asm_elementwise(
            STEP[0], STEP[1], arguments, is_pure=False, pack=s.shape[1] // 2,
            dtype=(gl.float16, gl.float32, gl.float32, gl.float32),
        )  # fmt: skip
    factor, m = _first_of_quad(factor, total), _first_of_quad(m, total)
    return p, factor, m, _first_of_quad(total_by_column, total)


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
    """Return acc [64, D] times factor [64, 4]; a warp whose factors are all 1 skips it."""
    D: gl.constexpr = acc.shape[1]
    wide = _by_column(factor, acc)
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
