"""Run attention under a plan on this rank, and dense attention beside it, on the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from assertions import assert_as_close_as
from dense import dense_attention
from pool import TIMEOUT

from hexiseq_triton.attention import hexiseq_attention
from hexiseq_triton.context import ParallelContext, init
from hexiseq_triton.planner import Plan

NAMES = ("o", "dq", "dk", "dv")


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


def planned(
    context: ParallelContext,
    tensors: dict[str, torch.Tensor],
    lengths: Sequence[int],
    **options: Any,
) -> list[torch.Tensor]:
    """Return o, dq, dk, dv of the replica's whole batch, computed under the plan."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    batch = context.shard(tensors, cu_seqlens=cu_seqlens)
    q, k, v = (batch[name].requires_grad_() for name in "qkv")
    o = hexiseq_attention(q, k, v, context, batch.layout, **options)
    o.backward(batch["do"])
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    return [context.unshard(x.detach(), batch.layout).cpu() for x in (o, q.grad, k.grad, v.grad)]


def dense(
    tensors: dict[str, torch.Tensor], lengths: Sequence[int], **options: Any
) -> list[torch.Tensor]:
    """Return o, dq, dk, dv of dense attention in one process."""
    q, k, v = (tensors[name].clone().requires_grad_() for name in "qkv")
    o = dense_attention(q, k, v, lengths, **options)
    grads = torch.autograd.grad(o, (q, k, v), tensors["do"], materialize_grads=True)
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
    """Worker: return the largest absolute error of o, dq, dk, dv; {} on an idle rank.

    Every fresh buffer is filled with NaN first, so an element that nothing wrote is seen.
    """
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    with init(plan, device=this_device(device, rank), timeout=TIMEOUT) as context:
        replica = context.replica or 0
        lengths = lengths_of_replica[replica]
        tensors = random_qkv(plan, sum(lengths), head_dim, seed + replica)
        found = planned(context, tensors, lengths, **options)
        if context.replica is None:
            assert all(x.shape[0] == 0 for x in found)
            return {}
        expected = dense(tensors, lengths, **options)
        return {name: _largest(a - b) for name, a, b in zip(NAMES, found, expected, strict=True)}


def check_low_precision(
    rank: int, plan: Plan, lengths: Sequence[int], head_dim: int, dtype: torch.dtype, device: str
) -> None:
    """Worker: the plan errs about as little as plain attention in the same dtype does."""
    with init(plan, device=this_device(device, rank), timeout=TIMEOUT) as context:
        tensors = random_qkv(plan, sum(lengths), head_dim, seed=3, dtype=dtype)
        found = planned(context, tensors, lengths, causal=True)
        if context.replica is None:
            return
        exact = dense({name: x.double() for name, x in tensors.items()}, lengths, causal=True)
        plain = dense(tensors, lengths, causal=True)
        for actual, reference, low in zip(found, exact, plain, strict=True):
            assert_as_close_as(actual, reference, low)


def _largest(difference: torch.Tensor) -> float:
    assert not difference.isnan().any()
    return float(difference.abs().max()) if difference.numel() else 0.0
