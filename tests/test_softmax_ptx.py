"""The PTX of the Hopper forward's softmax step, carried out instruction by instruction on numpy."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

from hexiseq_triton.kernels.hopper.softmax_ptx import step_ptx

LANES, SCALE, LOWEST = 32, np.float32(0.25), np.float32(-1e38)
LIMIT = 2.0**15
TYPES = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}
Registers = dict[str, np.ndarray]


def rounded(x: np.ndarray, pair: str) -> np.ndarray:
    """Round float32 to the 16-bit type of `pair`."""
    return torch.from_numpy(np.float32(x)).to(TYPES[pair]).float().numpy()


OPERATIONS: dict[str, Callable[..., np.ndarray]] = {
    "mov.f32": lambda a: a,
    "neg.ftz.f32": lambda a: -a,
    "ex2.approx.ftz.f32": np.exp2,
    "cvt.rpi.ftz.f32.f32": np.ceil,
    "add.ftz.f32": np.add,
    "sub.ftz.f32": np.subtract,
    "mul.ftz.f32": np.multiply,
    "max.f32": np.fmax,
    "fma.rn.ftz.f32": lambda a, b, c: a * b + c,
    "setp.gt.f32": np.greater,
    "setp.gtu.f32": lambda a, b: ~(a <= b),
    "setp.gtu.or.f32": lambda a, b, p: ~(a <= b) | p,
    "vote.sync.any.pred": lambda p, _: np.full(LANES, p.any()),
    "selp.f32": lambda a, b, p: np.where(p, a, b),
    "shfl.sync.bfly.b32": lambda a, other, *_: a[np.arange(LANES) ^ int(other[0])],
}


def carried_out(text: str, pair: str, registers: Registers) -> Registers:
    """Run a step on a warp; a register is [32], one of two packed numbers [2, 32]."""

    def value(name: str) -> np.ndarray:
        if name.startswith("0f"):
            return np.full(LANES, np.uint32(int(name[2:], 16)).view(np.float32))
        if name.startswith("0x") or name.isdigit():
            return np.full(LANES, int(name, 0))
        return registers[name]

    skip = ""
    for statement in re.sub(r"(\w+):", r"\1:;", text.strip("{} ")).split(";"):
        words = statement.replace(",", " ").split()
        if not words or words[0] == ".reg":
            continue
        if skip:
            skip = "" if words[0] == f"{skip}:" else skip
        elif words[0] == "@!again":
            skip = "" if value("again")[0] else words[2]
        elif words[0] == f"cvt.rn.{pair}.f32":
            registers[words[1]] = rounded(np.stack([value(words[3]), value(words[2])]), pair)
        elif words[0] == f"mul.rn.{pair}":
            registers[words[1]] = rounded(value(words[2]) * value(words[3]), pair)
        elif not words[0].endswith(":"):
            arguments = [value(word) for word in words[2:]]
            registers[words[1]] = np.asarray(OPERATIONS[words[0]](*arguments))
    assert not skip
    return registers


SEEN = {
    "ordinary": (0.0, 0.0, 1.0),
    "first half overflows": (400.0, 0.0, 1.0),
    "second half overflows": (0.0, 400.0, 1.0),
    "nothing seen before": (0.0, 0.0, LOWEST),
    "first half hidden": (-np.inf, 200.0, LOWEST),
    "first half hidden, low scores": (-np.inf, -900.0, LOWEST),
    "nothing seen at all": (-np.inf, -np.inf, LOWEST),
}
"""What is added to the scores of either half, and m before the step."""


@pytest.mark.parametrize("seen", SEEN.values(), ids=SEEN)
@pytest.mark.parametrize(("n", "pair", "in_halves"), [(64, "f16x2", True), (32, "bf16x2", False)])
@np.errstate(over="ignore", invalid="ignore")
def test_a_step_sums_powers_of_the_scores(
    n: int, pair: str, in_halves: bool, seen: tuple[float, float, float]
) -> None:
    draw = np.random.default_rng(0)
    first, second, old_m = seen
    scores = np.float32(draw.normal(0, 8, (n, LANES)))
    scores[: n // 2] += np.float32(first)
    scores[n // 2 :] += np.float32(second)
    m = np.full((2, LANES), np.float32(old_m))
    total = np.float32(draw.random((2, LANES)) * (old_m != LOWEST))
    row = np.arange(n) >> 1 & 1
    registers = {"$scale": np.full(LANES, SCALE)}
    for e in range(n):
        named = {3: scores[e], 4: m[row[e]], 5: total[row[e]], 6: registers["$scale"]}
        registers |= {f"${n // 2 + i * n + e}": x for i, x in named.items()}

    found = carried_out(step_ptx(n, pair, in_halves), pair, registers)

    new_m, factor, new_total = (
        np.stack([found[f"${n // 2 + i * n + 2 * r}"] for r in (0, 1)]) for i in range(3)
    )
    p = np.stack([found[f"${e // 2}"][e & 1] for e in range(n)])
    assert np.all(p <= LIMIT)
    expected = np.exp2(np.float64(scores) * SCALE - new_m[row])
    smallest = np.finfo(np.float16).tiny  # below it, fp16 has fewer digits
    np.testing.assert_allclose(p, expected, rtol=2**-7, atol=smallest)
    np.testing.assert_allclose(factor, np.exp2(np.float64(m) - new_m), rtol=1e-5)
    sums = np.stack([expected[row == r].sum(0) for r in (0, 1)])
    np.testing.assert_allclose(new_total, total * factor + sums, rtol=1e-4)
    by_quad = new_m.reshape(2, LANES // 4, 4)
    assert np.all(by_quad == by_quad[:, :, :1])
