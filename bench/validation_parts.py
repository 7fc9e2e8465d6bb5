"""Single kernels at shapes that no profile measures, and single links: the lowest two levels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist
from validation_cases import Line

from hexiseq_triton.channel import Channel
from hexiseq_triton.context import init
from hexiseq_triton.planner import ModelSpec, Plan, Split
from hexiseq_triton.planner.problem import Work
from hexiseq_triton.profiling.clock import timed
from hexiseq_triton.profiling.compute import (
    AttentionCalls,
    Rate,
    attention_rates,
    token_wise_rates,
)
from hexiseq_triton.profiling.fetching import keys_channel
from hexiseq_triton.profiling.links import pair_rounds
from hexiseq_triton.profiling.profile import CPU_SIZES, GPU_SIZES, Sizes, attention_heads

ON_GPU = replace(
    GPU_SIZES,
    rows=(4096, 16384),
    lengths=(8192, 32768),
    message_bytes=(2**22, 2**25, 2**28),
    budget_seconds=0.1,
)
ON_CPU = replace(CPU_SIZES, rows=(32,), lengths=(64,), message_bytes=(2**14,))
LINK_ROUNDS = 5


def kernel_lines(spec: ModelSpec, device: torch.device) -> list[Line]:
    """Return lines of what this rank's GPU takes for single kernels."""
    sizes = _sizes(device)
    lines = [
        _kernel_line(rate, _linear_flops(spec, rate), spec.head_dim)
        for rate in token_wise_rates(spec, sizes.rows, device, sizes.budget_seconds)
    ]
    for length in sizes.lengths:
        heads = attention_heads(spec, sizes)
        calls = AttentionCalls(spec.head_dim, length, *heads, device)
        for rate in attention_rates(calls, sizes.budget_seconds):
            again = Work.BACKWARD_ATTENTION if rate.work == "attention_backward" else 1.0
            lines.append(_kernel_line(rate, again * calls.forward_flops, spec.head_dim))
    return lines


def _sizes(device: torch.device) -> Sizes:
    return ON_GPU if device.type == "cuda" else ON_CPU


def _linear_flops(spec: ModelSpec, rate: Rate) -> float:
    forward = 2.0 * spec.layer_matrix_parameters * rate.tokens
    return Work.BACKWARD_LINEAR * forward if rate.work == "gemm_backward" else forward


def _kernel_line(rate: Rate, flops: float, head_dim: int) -> Line:
    rank = dist.get_rank()
    return {
        "level": "kernel",
        "case": f"{rate.work}, {rate.tokens} tokens, rank {rank}",
        "rank": rank,
        "head_dim": head_dim,
        "tokens": rate.tokens,
        "flops": {rate.work: flops},
        "measured_ms": 1e3 * flops / rate.flops_per_s,
    }


def link_lines(device: torch.device) -> Iterator[Line]:
    """Yield lines of pairs of ranks that exchange messages, both ways at once; collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with init(Plan.from_splits([Split((1,), (1,))] * size), device=device) as context:
        sizes = _sizes(device).message_bytes
        channel = keys_channel(context, max(sizes))
        for pairs in pair_rounds(size):
            peer = next((a + b - rank for a, b in pairs if rank in (a, b)), None)
            for num_bytes in sizes:
                own = None if peer is None else _seconds(channel, peer, num_bytes, device)
                everyone: list[float] = [0.0] * size
                dist.all_gather_object(everyone, own)
                for a, b in pairs:
                    yield {
                        "level": "link",
                        "case": f"{num_bytes} bytes, ranks {a} and {b}",
                        "sender": a,
                        "receiver": b,
                        "num_bytes": num_bytes,
                        "measured_ms": 1e3 * max(everyone[a], everyone[b]),
                    }


def _seconds(channel: Channel, peer: int, num_bytes: int, device: torch.device) -> float:
    out, into = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))

    def exchange() -> None:
        channel.start([(peer, out)], [(peer, into)], "a measured exchange").wait()

    exchange()
    return median(timed(exchange, device) for _ in range(LINK_ROUNDS))
