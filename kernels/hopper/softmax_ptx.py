"""The PTX of a softmax step, in which most warps skip the search for the row maxima.

A thread holds n scores of two rows: score e is of the upper row if bit 1 of e is clear, else of the
lower one. With the rows' old maxima m it computes p = 2^(scale s - m), packed in pairs, and the
sums of p. Where a sum is beyond LIMIT or NaN for some thread of the warp, all of it takes the
maxima of the scores as well and does the step again; else the maxima stay and the factors are 1.

In halves, the first half of the scores can be forgotten before the second one is begun: 16
registers less. If then the second half must be done again, its maxima are rounded up to a whole
distance from m, so that what is packed already can be scaled without changing a digit.
"""

from __future__ import annotations

LIMIT = "0f47000000"
"""2^15: fp16, bf16 and float32 hold it and what a row of such values adds up to."""
FAR = "0f7149F2CA"
"""1e30: a distance from the m of a row that has seen nothing, to which nothing can be added."""
_WARP = "0xffffffff"
_REGISTERS = (
    ".reg .pred bad, again; .reg .b32 both<2>; "
    ".reg .f32 x<2>, m<2>, minus_m<2>, factor<2>, part<4>, sum<2>, first_sum<2>, top<4>;"
)


def step_ptx(n: int, pair: str, in_halves: bool) -> str:
    """Return the step over n scores of a thread, packed as `pair`, "bf16x2" or "f16x2".

    Operands are n / 2 registers of p, then n each of the new m, the factor and the new total, of
    which number 0 is set for the upper row and number 2 for the lower one; then the inputs, n each
    of scores, m, total and scale.
    """
    new_m, factor, new_total, _s, m, total, _scale = (_operand(n, i) for i in range(7))
    text = [_REGISTERS]
    for r in (0, 1):
        text += [f"mov.f32 m{r}, ${m + 2 * r};", *_negated(r), f"mov.f32 factor{r}, 0f3F800000;"]
    if in_halves:
        text += _in_halves(n, pair)
    else:
        text += [*_powers(n, pair, 0, n), *_unless_bad("DONE"), *_maxima(n, 0, n), *_adopt()]
        text += [*_powers(n, pair, 0, n), "DONE:"]
    for r in (0, 1):
        text += [
            f"mov.f32 ${new_m + 2 * r}, m{r}; mov.f32 ${factor + 2 * r}, factor{r};",
            f"fma.rn.ftz.f32 ${new_total + 2 * r}, ${total + 2 * r}, factor{r}, sum{r};",
        ]
    return "{ " + " ".join(text) + " }"


def step_constraints(n: int) -> str:
    """Return the constraints of `step_ptx`: p is written while scores are still needed."""
    return ",".join(["=&r"] * (n // 2) + ["=&f"] * (3 * n) + ["f"] * (4 * n))


def _operand(n: int, i: int) -> int:
    """Return the first operand of group i of those with n registers."""
    return n // 2 + i * n


def _row(e: int) -> int:
    return e >> 1 & 1


def _negated(r: int) -> list[str]:
    return [f"neg.ftz.f32 minus_m{r}, m{r};"]


def _in_halves(n: int, pair: str) -> list[str]:
    half = n // 2
    text = [*_powers(n, pair, 0, half), *_unless_bad("NEXT"), *_maxima(n, 0, n), *_adopt()]
    text += [*_powers(n, pair, 0, half), "NEXT:"]
    text += ["mov.f32 first_sum0, sum0; mov.f32 first_sum1, sum1;"]
    text += [*_powers(n, pair, half, n), *_unless_bad("DONE"), *_maxima(n, half, n)]
    for r in (0, 1):
        text += [
            f"sub.ftz.f32 x0, top{r}, m{r}; cvt.rpi.ftz.f32.f32 x0, x0;",
            f"add.ftz.f32 m{r}, m{r}, x0;",
            f"setp.gt.f32 bad, x0, {FAR}; selp.f32 m{r}, top{r}, m{r}, bad;",
            *_negated(r),
            f"neg.ftz.f32 x1, x0; ex2.approx.ftz.f32 x1, x1; cvt.rn.{pair}.f32 both{r}, x1, x1;",
            f"mul.ftz.f32 factor{r}, factor{r}, x1; mul.ftz.f32 first_sum{r}, first_sum{r}, x1;",
        ]
    text += [f"mul.rn.{pair} ${e // 2}, ${e // 2}, both{_row(e)};" for e in range(0, half, 2)]
    text += [*_powers(n, pair, half, n), "DONE:"]
    return [*text, *(f"add.ftz.f32 sum{r}, sum{r}, first_sum{r};" for r in (0, 1))]


def _powers(n: int, pair: str, first: int, last: int) -> list[str]:
    """p of the scores [first, last), and its sums."""
    s, scale = _operand(n, 3), _operand(n, 6)
    text = []
    for e in range(first, last, 2):
        r = _row(e)
        for i in (0, 1):
            part = f"part{2 * r + i}"
            text += [
                f"fma.rn.ftz.f32 x{i}, ${s + e + i}, ${scale}, minus_m{r};",
                f"ex2.approx.ftz.f32 x{i}, x{i};",
                f"mov.f32 {part}, x{i};" if e < first + 4 else f"add.ftz.f32 {part}, {part}, x{i};",
            ]
        text += [f"cvt.rn.{pair}.f32 ${e // 2}, x1, x0;"]
    return [*text, *(f"add.ftz.f32 sum{r}, part{2 * r}, part{2 * r + 1};" for r in (0, 1))]


def _unless_bad(label: str) -> list[str]:
    return [
        f"setp.gtu.f32 bad, sum0, {LIMIT}; setp.gtu.or.f32 bad, sum1, {LIMIT}, bad;",
        f"vote.sync.any.pred again, bad, {_WARP}; @!again bra.uni {label};",
    ]


def _maxima(n: int, first: int, last: int) -> list[str]:
    """The rows' maxima, of m and of all their scores [first, last), in four threads."""
    s, scale = _operand(n, 3), _operand(n, 6)
    text = []
    for e in range(first, last):
        top = f"top{2 * _row(e) + (e & 1)}"
        text += [
            f"mov.f32 {top}, ${s + e};" if e < first + 4 else f"max.f32 {top}, {top}, ${s + e};"
        ]
    text += ["max.f32 top0, top0, top1; max.f32 top1, top2, top3;"]
    for r in (0, 1):
        for other in (1, 2):
            text += [f"shfl.sync.bfly.b32 x0, top{r}, {other}, 0x1f, {_WARP};"]
            text += [f"max.f32 top{r}, top{r}, x0;"]
        text += [f"mul.ftz.f32 top{r}, top{r}, ${scale}; max.f32 top{r}, top{r}, m{r};"]
    return text


def _adopt() -> list[str]:
    """Take the maxima found."""
    text = []
    for r in (0, 1):
        text += [
            f"sub.ftz.f32 factor{r}, m{r}, top{r}; ex2.approx.ftz.f32 factor{r}, factor{r};",
            f"mov.f32 m{r}, top{r};",
            *_negated(r),
        ]
    return text
