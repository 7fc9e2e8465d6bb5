"""Attention kernels on one GPU: read TFLOP/s, higher is better; about 790 is an H100's ceiling.

Causal, bf16, 32 query and 8 KV heads. FLOPs are 4 Hq D n^2 / 2 for each document of n tokens,
2.5 times that backward. The package always runs its general kernels with their tile map; peers run
in the same process on the same card. Medians of CUDA events.

    suite     forward, backward   one document
              varlen              documents of long-tail lengths, 64K tokens in all
              carried             64K queries see 8 chunks of 8K keys in 8 launches, or in one
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch
from attention_impls import BACKWARD_RUNS_FORWARD, IMPLS, Call, Problem, Unsupported, portable
from measure import event_ms, long_tail, record, timed
from paired import carried

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


DENSE = [(16384, 128), (65536, 128), (16384, 64), (4096, 128)]
DOCUMENTS = long_tail(65536)
CARRIED: dict[str, tuple[int, Callable[[Call], Call]]] = {
    "hexiseq": (8, lambda call: call),
    "hexiseq-one-launch": (1, lambda call: call),
    "hexiseq-portable": (8, portable),
    "hexiseq-portable-one-launch": (1, portable),
}
"""How many chunks, one a launch, and with which kernels."""


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


@pytest.mark.parametrize("impl", CARRIED)
def bench_carried(benchmark: Any, impl: str) -> None:
    """64K queries fully see 64K keys that arrive in chunks; state passes through float32."""
    num_chunks, wrap = CARRIED[impl]
    problem = Problem((65536,), 128)
    case = "d128-q65536-k65536-full-gqa32x8-chunks8"
    benchmark.group = f"carried {case}"
    ms = timed(benchmark, wrap(carried(problem, num_chunks, per_launch=1)))
    flops = 2 * problem.forward_flops
    record(benchmark, "carried", case, impl, "forward", ms, flops=flops)
