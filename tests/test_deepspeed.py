"""DeepSpeed's attention class under uneven plans equals dense attention in one process."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from equality import NAMES, dense, random_qkv
from pool import TIMEOUT, Pool
from torch import nn

from hexiseq_triton.context import ParallelContext, init
from hexiseq_triton.errors import InputError
from hexiseq_triton.integrations.deepspeed import DistributedAttention
from hexiseq_triton.module import HexiSeqAttention
from hexiseq_triton.planner import Plan, Split
from hexiseq_triton.rope import apply_rope, rope_tables

PLAN = Plan.from_splits(
    [Split((40, 0, 13), (5, 2, 1)), Split((43,), (8,))], num_kv_heads=2, world_size=5
)
"""Rank 1 has heads and no token; rank 4 is idle."""
LENGTHS = [31, 1, 40, 0, 24]
HEAD_DIM = 16


def shard(context: ParallelContext, tensors: dict[str, torch.Tensor]) -> Any:
    return context.shard(tensors, cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0))


def stream_tables(rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cos, sin) of the whole stream, [T, R], each pair's number twice."""
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    cos, sin = rope_tables(positions, rotary_dim)
    return torch.cat([cos, cos], dim=1).double(), torch.cat([sin, sin], dim=1).double()


def attended(rank: int, batch_dim_idx: int, rotary_dim: int | None) -> list[torch.Tensor]:
    """Worker: return o, dq, dk, dv of the whole batch, from calls in DeepSpeed's shapes."""
    tensors = random_qkv(PLAN, sum(LENGTHS), HEAD_DIM, seed=0)
    if rotary_dim is not None:
        tensors |= dict(zip(("cos", "sin"), stream_tables(rotary_dim), strict=True))
    with init(PLAN, device="cpu", timeout=TIMEOUT) as context:
        attention = DistributedAttention(HexiSeqAttention(context, causal=True))
        batch = shard(context, tensors)
        leaves = [batch[name].unsqueeze(batch_dim_idx).requires_grad_() for name in "qkv"]
        tables = None
        if rotary_dim is not None:
            tables = (batch["cos"][None, :, None], batch["sin"][None, :, None])
        out = attention(*leaves, batch_dim_idx, tables, None, layout=batch.layout, causal=True)
        assert out.shape == leaves[0].shape
        grads = torch.autograd.grad(out, leaves, batch["do"].unsqueeze(batch_dim_idx))
        return [
            context.unshard(x.detach().squeeze(batch_dim_idx), batch.layout) for x in (out, *grads)
        ]


def expected(rotary_dim: int | None) -> list[torch.Tensor]:
    tensors = random_qkv(PLAN, sum(LENGTHS), HEAD_DIM, seed=0)
    if rotary_dim is None:
        return dense(tensors, LENGTHS, causal=True)
    cos, sin = stream_tables(rotary_dim)
    leaves = [tensors[name].requires_grad_() for name in "qk"]
    turned = [apply_rope(x, cos, sin, rotary_dim=rotary_dim) for x in leaves]
    q, k = (x.detach() for x in turned)
    o, dq, dk, dv = dense(tensors | {"q": q, "k": k}, LENGTHS, causal=True)
    return [o, *torch.autograd.grad(turned, leaves, [dq, dk]), dv]


@pytest.mark.parametrize(("batch_dim_idx", "rotary_dim"), [(0, None), (1, 8)])
def test_it_equals_dense_attention(pool: Pool, batch_dim_idx: int, rotary_dim: int | None) -> None:
    found = pool.run(attended, batch_dim_idx, rotary_dim)
    assert all(x.shape[0] == 0 for x in found[4])
    for rank in range(4):
        for name, ours, theirs in zip(NAMES, found[rank], expected(rotary_dim), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12, msg=f"{name}, rank {rank}")


REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "dropout_p is 0.1": ((), {"dropout_p": 0.1}),
    "attention_bias is a Tensor": ((), {"attention_bias": torch.zeros(1)}),
    "attention_mask is a Tensor": ((), {"attention_mask": torch.ones(2, 2)}),
    "causal is False; .* made with True": ((), {"causal": False}),
    "argument 1 after rotary_pos_emb is a Tensor": ((torch.ones(2, 2),), {}),
}


def refusals(rank: int) -> dict[str, str]:
    """Worker: return what each call is told that can't be honoured; afterwards one still works."""
    found = {}
    with init(PLAN, device="cpu", timeout=TIMEOUT) as context:
        attention = DistributedAttention(HexiSeqAttention(context, causal=True))
        batch = shard(context, random_qkv(PLAN, sum(LENGTHS), HEAD_DIM, seed=0))
        q, k, v = (batch[name][None] for name in "qkv")

        def told(batch_dim_idx: int, *args: Any, **kwargs: Any) -> str:
            with pytest.raises(InputError) as error:
                attention(q, k, v, batch_dim_idx, None, *args, **kwargs)
            return str(error.value)

        for name, (args, kwargs) in REFUSED.items():
            found[name] = told(0, *args, layout=batch.layout, **kwargs)
        found["without layout="] = told(0)
        found["batch_dim_idx is 2"] = told(2, layout=batch.layout)
        if batch.layout.num_tokens > 1:
            found["one packed stream"] = told(1, layout=batch.layout)
        attention(q, k, v, 0, layout=batch.layout, dropout_p=0.0, attention_mask=None)
    return found


def test_what_it_cannot_honour_is_refused_by_name(pool: Pool) -> None:
    for found in pool.run(refusals):
        assert len(found) >= len(REFUSED) + 2
        for expected_text, message in found.items():
            assert re.search(expected_text, message)


def test_a_local_attention_without_a_context_is_refused() -> None:
    with pytest.raises(InputError, match="local_attention is a Identity"):
        DistributedAttention(nn.Identity())  # type: ignore[arg-type]


def test_the_signature_is_deepspeeds() -> None:
    layer = pytest.importorskip("deepspeed.sequence.layer")
    theirs = inspect.signature(layer.DistributedAttention.forward).parameters.values()
    ours = inspect.signature(DistributedAttention.forward).parameters.values()
    assert [(p.name, p.kind, p.default) for p in ours] == [
        (p.name, p.kind, p.default) for p in theirs
    ]
