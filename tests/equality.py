"""Run attention under a plan on this rank, and dense attention beside it, on the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from assertions import assert_as_close_as
from dense import dense_attention
from pool import TIMEOUT

from hexiseq_triton.attention import hexiseq_attention
from hexiseq_triton.context import ParallelContext, init
from hexiseq_triton.planner import Plan

NAMES = ("o", "dq", "dk", "dv")
NAMES_WITH_SINK = (*NAMES, "dsink")


def random_qkv(
    plan: Plan, total: int, head_dim: int, seed: int, dtype: torch.dtype = torch.float64
) -> dict[str, torch.Tensor]:
    """Return global q, k, v and do, N(0, 1), the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    heads = {
        "q": plan.num_heads,
        "k": plan.num_kv_heads,
        "v": plan.num_kv_heads,
        "do": plan.num_heads,
    }
    return {
        name: torch.randn(total, count, head_dim, dtype=torch.float64, generator=generator).to(
            dtype
        )
        for name, count in heads.items()
    }


def random_sink(plan: Plan, seed: int) -> torch.Tensor:
    """Return one logit for each query head, N(0, 1), the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(plan.num_heads, dtype=torch.float64, generator=generator)


def planned(
    context: ParallelContext,
    tensors: dict[str, torch.Tensor],
    lengths: Sequence[int],
    *,
    sink: torch.Tensor | None = None,
    **options: Any,
) -> list[torch.Tensor]:
    """Return o, dq, dk, dv, and dsink if there is one, of the replica's whole batch."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    batch = context.shard(tensors, cu_seqlens=cu_seqlens)
    q, k, v = (batch[name].requires_grad_() for name in "qkv")
    if sink is not None:
        sink = sink.to(context.device, copy=True).requires_grad_()
    o = hexiseq_attention(q, k, v, context, batch.layout, learnable_sink=sink, **options)
    o.backward(batch["do"])
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    found = [context.unshard(x.detach(), batch.layout).cpu() for x in (o, q.grad, k.grad, v.grad)]
    if sink is None:
        return found
    if context.routes.group is not None:
        dist.all_reduce(sink.grad, group=context.routes.group)
    assert sink.grad is not None
    return [*found, sink.grad.cpu()]


def dense(
    tensors: dict[str, torch.Tensor],
    lengths: Sequence[int],
    *,
    sink: torch.Tensor | None = None,
    reduce_dtype: torch.dtype | None = None,
    **options: Any,
) -> list[torch.Tensor]:
    """Return the same of dense attention in one process, which reduces nothing."""
    kept = [tensors[name] for name in "qkv"] + ([] if sink is None else [sink])
    leaves = [x.clone().requires_grad_() for x in kept]
    o = dense_attention(*leaves[:3], lengths, sink=None if sink is None else leaves[3], **options)
    grads = torch.autograd.grad(o, leaves, tensors["do"], materialize_grads=True)
    return [o.detach(), *grads]


def this_device(kind: str, rank: int) -> str:
    """Return the device of a worker: GPU r for rank r, or the CPU."""
    return f"cuda:{rank}" if kind == "cuda" else kind


def largest_errors(
    rank: int,
    plan: Plan,
    lengths_of_replica: Sequence[Sequence[int]],
    head_dim: int,
    options: dict[str, Any],
    seed: int,
    device: str = "cpu",
) -> dict[str, float]:
    """Worker: return the largest absolute error of o, dq, dk, dv, dsink; {} on an idle rank.

    The options are those of attention; where they hold "sink", one is drawn. Every fresh buffer is
    filled with NaN first, so an element that nothing wrote is seen.
    """
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    with init(plan, device=this_device(device, rank), timeout=TIMEOUT) as context:
        replica = context.replica or 0
        lengths = lengths_of_replica[replica]
        tensors = random_qkv(plan, sum(lengths), head_dim, seed + replica)
        if "sink" in options:
            options = options | {"sink": random_sink(plan, seed)}
        found = planned(context, tensors, lengths, **options)
        if context.replica is None:
            assert all(x.shape[0] == 0 for x in found[:4])
            assert all((dsink == 0).all() for dsink in found[4:])
            return {}
        expected = dense(tensors, lengths, **options)
        errors = [largest(a - b) for a, b in zip(found, expected, strict=True)]
        return dict(zip(NAMES_WITH_SINK, errors, strict=False))


def check_low_precision(
    rank: int,
    plan: Plan,
    lengths: Sequence[int],
    head_dim: int,
    dtype: torch.dtype,
    device: str,
    symmetric_memory: bool = True,
) -> None:
    """Worker: the plan errs about as little as plain attention in the same dtype does."""
    torch.use_deterministic_algorithms(False)
    options: dict[str, Any] = {"timeout": TIMEOUT, "symmetric_memory": symmetric_memory}
    with init(plan, device=this_device(device, rank), **options) as context:
        tensors = random_qkv(plan, sum(lengths), head_dim, seed=3, dtype=dtype)
        found = planned(context, tensors, lengths, causal=True)
        if context.replica is None:
            return
        exact = dense({name: x.double() for name, x in tensors.items()}, lengths, causal=True)
        plain = dense(tensors, lengths, causal=True)
        for actual, reference, low in zip(found, exact, plain, strict=True):
            assert_as_close_as(actual, reference, low)


def largest(difference: torch.Tensor) -> float:
    assert not difference.isnan().any()
    return float(difference.abs().max()) if difference.numel() else 0.0
