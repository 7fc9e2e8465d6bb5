"""DeepSpeed's attention class under uneven plans equals dense attention in one process."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import pytest
import torch
from commands import in_a_world
from equality import NAMES, dense, random_qkv
from pool import TIMEOUT, Pool
from torch import nn
from torch.nn.functional import cross_entropy

from hexiseq_triton.context import ParallelContext, init
from hexiseq_triton.errors import HexiSeqError, InputError
from hexiseq_triton.flash import flash_attn_varlen_func
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


# -------------------------------------------------------------------- DeepSpeed's engine


class Decoder(nn.Module):
    """One attention layer over packed rows."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same weights on every rank
        self.embedding, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.q, self.kv = nn.Linear(32, 8 * HEAD_DIM), nn.Linear(32, 2 * 2 * HEAD_DIM)
        self.out = nn.Linear(8 * HEAD_DIM, 32)
        self.attention = attention

    def forward(self, ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Return the logits of [1, T] tokens."""
        x = self.embedding(ids)
        q = self.q(x).unflatten(-1, (8, HEAD_DIM))
        k, v = self.kv(x).unflatten(-1, (2, 2, HEAD_DIM)).unbind(-3)
        o = self.attention(q, k, v, 0, **arguments)
        return self.head(x + self.out(o.flatten(-2)))


class Alone(nn.Module):
    """What DeepSpeed's class does with one process."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: int) -> torch.Tensor:
        bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int()
        rows = (x[0] for x in (q, k, v))
        out = flash_attn_varlen_func(*rows, bounds, bounds, None, None, causal=True)
        assert isinstance(out, torch.Tensor)
        return out[None]


STEPS = 3


def stream() -> dict[str, torch.Tensor]:
    ids = torch.randint(64, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    return {"ids": ids, "labels": ids}


def trained(rank: int, stage: int) -> list[float]:
    """Worker: return the losses of a few steps of DeepSpeed's engine."""
    in_a_world(rank)
    deepspeed = importlib.import_module("deepspeed")
    deepspeed.ops.__compatible_ops__.clear()  # would compile C++ collectives; gloo's do
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }
    losses = []
    with init(PLAN, device="cpu", timeout=TIMEOUT) as context:
        attention = DistributedAttention(HexiSeqAttention(context, causal=True))
        model, *_ = deepspeed.initialize(model=Decoder(attention), config=settings)
        batch = shard(context, stream())
        for _ in range(STEPS):
            logits = model(batch["ids"][None], layout=batch.layout)[0]
            loss_sum = cross_entropy(logits, batch["labels"], reduction="sum")
            valid = int((batch["labels"] >= 0).sum())
            loss = context.token_mean(loss_sum, valid, grad_average=context.mesh.size())
            model.backward(loss)
            model.step()
            losses.append(float(loss))
    return losses


def trained_alone() -> list[float]:
    """Return the losses of the same steps in one process, without DeepSpeed."""
    model = Decoder(Alone())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = stream()["ids"]
    labels = [part[1:] for part in ids.split(LENGTHS)]
    losses = []
    for _ in range(STEPS):
        logits = [part[:-1] for part in model(ids[None])[0].split(LENGTHS)]
        loss = cross_entropy(torch.cat(logits), torch.cat(labels))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_zero_stage_trains_as_one_process(pool: Pool, stage: int) -> None:
    pytest.importorskip("deepspeed")
    expected = trained_alone()
    assert expected[-1] < expected[0] - 0.5
    for found in pool.run(trained, stage):
        assert found == pytest.approx(expected, rel=1e-5)


# -------------------------------------------------------------------- what is refused

UNSET: dict[str, Any] = {"dropout_p": 0.0, "attention_mask": None}
REFUSED: dict[str, tuple[int, tuple[Any, ...], dict[str, Any]]] = {
    "dropout_p is 0.1": (0, (), {"dropout_p": 0.1}),
    "attention_bias is a Tensor": (0, (), {"attention_bias": torch.zeros(1)}),
    "attention_mask is a Tensor": (0, (), {"attention_mask": torch.ones(2, 2)}),
    "causal is False; .* made with True": (0, (), {"causal": False}),
    "argument 1 after rotary_pos_emb is a Tensor": (0, (torch.ones(2, 2),), {}),
    "without layout=": (0, (), {"layout": None}),
    "batch_dim_idx is 2": (2, (), {}),
    "one packed stream": (1, (), {}),
    "rotary_pos_emb is a tuple of 1; it must be two tensors": (
        0,
        (),
        {"rotary_pos_emb": (torch.ones(1, 1, 1, 8),)},
    ),
}


def refused(rank: int, names: list[str], wrong_ranks: tuple[int, ...]) -> list[str]:
    """Worker: return what each call is told that some ranks make wrong."""
    found = []
    for name in names:
        with init(PLAN, device="cpu", timeout=TIMEOUT) as context:
            attention = DistributedAttention(HexiSeqAttention(context, causal=True))
            batch = shard(context, random_qkv(PLAN, sum(LENGTHS), HEAD_DIM, seed=0))
            dim, args, kwargs = REFUSED[name] if rank in wrong_ranks else (0, (), UNSET)
            q, k, v = (batch[tensor][None] for tensor in "qkv")
            try:
                named = {"layout": batch.layout} | kwargs
                tables = named.pop("rotary_pos_emb", None)
                attention(q, k, v, dim, tables, *args, **named)
                found.append("accepted")
            except HexiSeqError as error:
                found.append(f"{type(error).__name__}: {error}")
    return found


def test_what_it_cannot_honour_is_refused_by_name(pool: Pool) -> None:
    # but for the idle rank, whose refusal could come before the others have their rows
    *ranks, idle = pool.run(refused, list(REFUSED), (0, 1, 2, 3))
    for found in ranks:
        for expected_text, message in zip(REFUSED, found, strict=True):
            assert re.search(f"InputError: .*{expected_text}", message)
    assert set(idle) == {"accepted"}


def test_what_one_rank_refuses_the_others_hear_of(pool: Pool) -> None:
    ((first,), (wrong,), (third,), (fourth,), (idle,)) = pool.run(refused, list(REFUSED)[:1], (1,))
    assert wrong.startswith("InputError: dropout_p is 0.1")
    assert [first, third, fourth] == [f"PeerError: rank 1: {wrong}"] * 3
    assert idle == "accepted"


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
