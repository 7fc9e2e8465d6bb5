"""Attention kernels on one GPU: read TFLOP/s, higher is better; about 790 is an H100's ceiling.

Causal, bf16, 32 query and 8 KV heads. FLOPs are 4 Hq D n^2 / 2 for each document of n tokens,
2.5 times that backward. The package always runs its general kernels with their tile map; peers run
in the same process on the same card. Medians of CUDA events.

    suite     forward, backward   one document
              varlen              documents of long-tail lengths, 64K tokens in all
              carried             64K queries see 8 chunks of 8K keys in 8 launches, or in one
"""

from __future__ import annotations

import random
from statistics import median
from typing import Any

import pytest
import torch
from attention_impls import BACKWARD_RUNS_FORWARD, DEVICE, IMPLS, Problem, Unsupported
from measure import event_ms, record, timed

from hexiseq_triton.kernels import AttentionOptions, HeadMap
from hexiseq_triton.segments import FULL, Segment

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


def long_tail(total: int) -> tuple[int, ...]:
    """Return document lengths drawn log-normally, median 1,100 tokens, that add up to `total`."""
    draw = random.Random(0)
    lengths: list[int] = []
    while sum(lengths) < total:
        length = min(max(16, int(draw.lognormvariate(7.0, 1.3))), 32768)
        lengths.append(min(length, total - sum(lengths)))
    return tuple(lengths)


DENSE = [(16384, 128), (65536, 128), (16384, 64), (4096, 128)]
DOCUMENTS = long_tail(65536)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("tokens", "head_dim"), DENSE)
def bench_one_document(
    benchmark: Any, tokens: int, head_dim: int, direction: str, impl: str
) -> None:
    case = f"d{head_dim}-s{tokens}-causal-gqa32x8"
    run(benchmark, direction, case, impl, direction, Problem((tokens,), head_dim))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("head_dim", [128, 64])
def bench_documents(benchmark: Any, head_dim: int, direction: str, impl: str) -> None:
    case = f"d{head_dim}-t65536-docs{len(DOCUMENTS)}-causal-gqa32x8"
    run(benchmark, "varlen", case, impl, direction, Problem(DOCUMENTS, head_dim))


def run(benchmark: Any, suite: str, case: str, impl: str, direction: str, problem: Problem) -> None:
    """Time one call of one implementation and record it."""
    benchmark.group = f"{suite} {case} {direction}"
    try:
        calls = IMPLS[impl](problem)
    except Unsupported as reason:
        pytest.skip(str(reason))
    ms = timed(benchmark, getattr(calls, direction))
    if direction == "backward" and impl in BACKWARD_RUNS_FORWARD:
        ms -= timed_again(calls.forward)
    flops = problem.forward_flops if direction == "forward" else problem.backward_flops
    record(benchmark, suite, case, impl, direction, ms, flops=flops)


def timed_again(function: Any) -> float:
    """Return the median milliseconds of a second function of the same bench."""
    return median(event_ms(function) for _ in range(7))


@pytest.mark.parametrize("num_launches", [1, 8])
def bench_carried(benchmark: Any, num_launches: int) -> None:
    """64K queries fully see 64K keys that arrive in chunks; state passes through float32."""
    from hexiseq_triton.kernels.forward import attention_forward

    tokens, head_dim = 65536, 128
    problem = Problem((tokens,), head_dim)
    q, k, v, _ = problem.inputs
    o = torch.empty(q.shape, device=DEVICE)
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[1], tokens, device=DEVICE)
    call = (HeadMap(0, 4), AttentionOptions(FULL, head_dim**-0.5))
    size = tokens // num_launches

    def forward() -> None:
        for i in range(num_launches):
            rows = slice(i * size, (i + 1) * size)
            last = i == num_launches - 1
            attention_forward(
                q, k[rows], v[rows], o, lse,
                (Segment(0, 0, tokens),), (Segment(0, rows.start, rows.stop),), *call,
                first=i == 0, out=out if last else None,
            )  # fmt: skip

    benchmark.group = "carried"
    ms = timed(benchmark, forward)
    case = f"d{head_dim}-q{tokens}-k{tokens}-full-gqa32x8-launches{num_launches}"
    flops = 2 * problem.forward_flops
    record(benchmark, "carried", case, "hexiseq", "forward", ms, flops=flops)
