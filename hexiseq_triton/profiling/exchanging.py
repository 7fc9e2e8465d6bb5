"""How much longer attention takes under a plan that exchanges keys, measured by such a plan.

All ranks are groups of one and hold equally many tokens of one document. What a rank's own work
then takes, waiting left out, is put beside its share of the same attention on one GPU. The
difference is what the exchange costs computing: launches that carry their state from one to the
next, partial gradients that are set to zero and added up, and room for transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from statistics import median

import torch
import torch.distributed as dist

from hexiseq_triton.attention import hexiseq_attention
from hexiseq_triton.context import ParallelContext, init
from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.planner import Plan, Split
from hexiseq_triton.profiling.clock import timed
from hexiseq_triton.timeline import Span

CALLS = 5
WAITS = ("wait for keys", "wait for gradients")


def even_ring(
    tokens: int, heads: int, kv_heads: int, device: torch.device
) -> AbstractContextManager[ParallelContext]:
    """Open a plan under which every rank is a group of one, with equal shares of `tokens`."""
    each = tokens // dist.get_world_size()
    splits = [Split((each,), (heads,))] * dist.get_world_size()
    return init(Plan.from_splits(splits, num_kv_heads=kv_heads), device=device)


def exchanging_seconds(context: ParallelContext, head_dim: int, dtype: torch.dtype) -> float:
    """Return a rank's own seconds of forward and backward under the plan; a collective call."""
    plan, device = context.plan, context.device
    layout = BatchLayout(plan, context.rank, (plan.seq_len,))
    q, k, v = (
        torch.randn(layout.num_tokens, heads, head_dim, dtype=dtype, device=device)
        .requires_grad_()
        for heads in (plan.num_heads, plan.num_kv_heads, plan.num_kv_heads)
    )  # fmt: skip
    gradient = torch.randn_like(q)

    def call() -> None:
        hexiseq_attention(q, k, v, context, layout, causal=True).backward(gradient)

    call()
    context.timeline.enabled = True
    try:
        return median(_own_seconds(context, call) for _ in range(CALLS))
    finally:
        context.timeline.enabled = False
        context.timeline.clear()


def _own_seconds(context: ParallelContext, call: Callable[[], None]) -> float:
    context.timeline.clear()
    dist.barrier()
    seconds = timed(call, context.device)
    return seconds - waited_seconds(context.timeline.spans())


def waited_seconds(spans: Sequence[Span]) -> float:
    """Return how long the compute stream waited for the exchange."""
    return sum(span.seconds for span in spans if span.name in WAITS)
