"""The Hopper backward on random layouts: near float64, and repeatable where that is asked for.

A wrong order of shared memory's readers and writers shows now and then only, and most with few
programs and short tiles: so the layouts have windows, tiny documents and rows that see nothing, and
leave most of the card free.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from assertions import assert_as_close_as
from kernel_runs import DEVICE, ON_CARD, Case, chunks_of

from hexiseq_triton.kernels import reference
from hexiseq_triton.kernels.backward import attention_backward
from hexiseq_triton.kernels.hopper import guard
from hexiseq_triton.kernels.options import PlacedSegment, placed

ON_HOPPER = ON_CARD and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_HOPPER, reason="needs a card of compute capability 9.0"),
]
BF16, FP16 = torch.bfloat16, torch.float16
LAYOUTS = 6
REPEATS = 20
FREE = (0, 8, 128)
"""Multiprocessors left to others, of an H100's 132."""
FEW_ROWS = 1.3
"""Leniency: with few rows the RMS error of plain torch is itself off by a quarter now and then."""
GAP = 17
"""Rows between chunks of keys in one buffer."""


@pytest.mark.parametrize("deterministic", [False, True], ids=["fused", "repeatable"])
@pytest.mark.parametrize("softcap", [0.0, 5.0], ids=["", "softcap"])
@pytest.mark.parametrize("windows", [False, True], ids=["", "windows"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_random_layouts_match_float64_and_repeat(
    head_dim: int, dtype: torch.dtype, windows: bool, softcap: float, deterministic: bool
) -> None:
    for seed in range(LAYOUTS):
        draw = random.Random(seed)
        case = drawn(draw, head_dim, dtype, windows, softcap)
        sm_margin = draw.choice(FREE)
        inputs = case.inputs()
        assert guard.runs("backward" if head_dim < 256 else "grad_q", inputs[0])
        state = attended(case, inputs)
        found = gradients(case, inputs, state, deterministic, sm_margin)
        exact, lowp = (case.dense(inputs, t)[1:4] for t in (torch.float64, dtype))
        for a, b, c in zip(found, exact, lowp, strict=True):
            assert_as_close_as(a, b, c, leniency=FEW_ROWS)
        for _ in range(REPEATS):
            again = gradients(case, inputs, state, deterministic, sm_margin)
            assert deterministic is False or torch.equal(again[0], found[0]), (case, sm_margin)
            assert torch.equal(again[1], found[1]), (case, sm_margin)
            assert torch.equal(again[2], found[2]), (case, sm_margin)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_another_stream_waits_for_the_work_items(head_dim: int) -> None:
    case = Case((300 + head_dim,), head_dim, 2, 2, BF16)  # lengths that no other test has
    q, k, v, do = inputs = case.inputs()
    state = attended(case, inputs)
    expected = case.dense(inputs, torch.float64)[1:4], case.dense(inputs, BF16)[1:4]
    found = [[torch.full_like(x, torch.nan) for x in (q, k, v)] for _ in range(2)]
    torch.cuda.synchronize()
    for grads, cycles in zip(found, (1 << 28, 0), strict=True):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(cycles)
            attention_backward(
                q, k, v, do, *state, *grads, case.segments, case.segments, *case.call,
                accumulate=False,
            )  # fmt: skip
    torch.cuda.synchronize()
    for grads in found:
        for results in zip(grads, *expected, strict=True):
            assert_as_close_as(*results)


def drawn(
    draw: random.Random, head_dim: int, dtype: torch.dtype, windows: bool, softcap: float
) -> Case:
    """Return a few documents under some mask."""
    lengths = [draw.choice([0, 1, 3, 64, 65, 129, draw.randint(1, 700)]) for _ in range(5)]
    causal = draw.random() < 0.7
    behind = draw.choice([0, 5, 64, 100, 300]) if windows else -1
    ahead = draw.choice([0, 70, 200]) if windows and not causal else -1
    return Case(
        (40, *lengths[: draw.randint(0, 5)]), head_dim, draw.choice([1, 2, 3]),
        draw.choice([1, 2, 7]), dtype, causal, (behind, ahead), softcap,
        draw.choice([None, 0.3 / 8]),
    )  # fmt: skip


def attended(case: Case, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return lse and delta, of attention in float64."""
    q, k, v, do = (x.double() for x in inputs)
    o = torch.zeros_like(q)
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, device=DEVICE, dtype=torch.float64)
    segments = case.segments, case.segments
    reference.attention_forward(q, k, v, o, lse, *segments, *case.call)
    return lse.float(), (do * o.to(case.dtype)).sum(-1).T.float().contiguous()


def gradients(
    case: Case,
    inputs: Sequence[torch.Tensor],
    state: tuple[torch.Tensor, torch.Tensor],
    deterministic: bool,
    sm_margin: int,
) -> list[torch.Tensor]:
    """Return dq, dk and dv over NaN, from three chunks of keys that stand apart in one buffer."""
    q, k, v, do = inputs
    chunks = list(chunks_of(case, 3))
    at, segments, homes = 0, list[PlacedSegment](), []
    for rows, run in chunks:
        segments += placed(run, at)
        homes.append((rows, slice(at, at + rows.stop - rows.start)))
        at = homes[-1][1].stop + GAP
    spread = [
        torch.full((at, *x.shape[1:]), torch.nan, dtype=x.dtype, device=DEVICE) for x in (k, v)
    ]
    dq, *grads = (torch.full_like(x, torch.nan) for x in (q, *spread))
    for rows, home in homes:
        for x, y in zip((k, v), spread, strict=True):
            y[home] = x[rows]
    attention_backward(
        q, *spread, do, *state, dq, *grads, case.segments, tuple(segments), *case.call,
        accumulate=False, deterministic=deterministic, sm_margin=sm_margin,
    )  # fmt: skip
    gathered = [torch.full_like(x, torch.nan) for x in (k, v)]
    for rows, home in homes:
        for x, y in zip(gathered, grads, strict=True):
            x[rows] = y[home]
    return [dq, *gathered]
