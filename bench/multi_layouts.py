"""The layouts that the multi-GPU suite times, and the same attention on one of the GPUs alone.

heads     one group of all ranks: all-to-alls, no exchange of keys (Ulysses)
ring      groups of one rank: exchange of keys, no all-to-all
hybrid    groups of two
uneven    groups of three ranks and of one, all tokens and heads uneven

With "-spread" at the end, keys come in that order: a piece of every group's at any time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hexiseq_triton.attention import hexiseq_attention
from hexiseq_triton.context import ParallelContext
from hexiseq_triton.flash import flash_attn_func, flash_attn_varlen_func
from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.planner import ExchangePlan, Plan, Split
from hexiseq_triton.segments import CAUSAL, visible_pairs


@dataclass(frozen=True)
class Shape:
    """Causal attention over packed documents, bf16."""

    lengths: tuple[int, ...]
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def case(self) -> str:
        documents = f"-docs{len(self.lengths)}" if len(self.lengths) > 1 else ""
        heads = f"gqa{self.q_heads}x{self.kv_heads}"
        return f"d{self.head_dim}-t{self.tokens}{documents}-causal-{heads}"

    @property
    def forward_flops(self) -> float:
        return sum(2 * self.q_heads * self.head_dim * n * n for n in self.lengths)


def long_tailed(tokens: int) -> tuple[int, ...]:
    """Return lengths of documents drawn from a log-normal distribution that add up to `tokens`."""
    draw = random.Random(0)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(min(tokens - sum(lengths), max(16, int(draw.lognormvariate(7.0, 1.6)))))
    return tuple(lengths)


def plan_of(layout: str, shape: Shape, num_ranks: int) -> Plan:
    """Return the plan of a layout's name for `num_ranks` ranks, which divide the tokens."""
    name, _, order = layout.partition("-")
    tokens, heads = shape.tokens // num_ranks, shape.q_heads
    groups = {
        "heads": [Split((tokens,) * num_ranks, (heads // num_ranks,) * num_ranks)],
        "ring": [Split((tokens,), (heads,))] * num_ranks,
    }
    if num_ranks == 4:
        groups["hybrid"] = [Split((tokens,) * 2, (heads // 2,) * 2)] * 2
        three = (tokens // 2 * 3, tokens // 4 * 3, tokens // 4 * 3)
        q_per_kv = heads // shape.kv_heads
        split = (heads - 5 * q_per_kv, 3 * q_per_kv, 2 * q_per_kv)
        groups["uneven"] = [Split(three, split), Split((shape.tokens - sum(three),), (heads,))]
    exchange = ExchangePlan(
        chunk_tokens=8192, window=4, order="spread" if order == "spread" else "ring"
    )
    return Plan.from_splits(groups[name], num_kv_heads=shape.kv_heads, exchange=exchange)


def busiest_flops(shape: Shape, plan: Plan) -> float:
    """Return the forward FLOPs of the rank that attends most."""
    layout = BatchLayout(plan, 0, shape.lengths)
    everything = [segment for group in layout.group_segments for segment in group]
    return max(
        4.0 * shape.head_dim * share.num_q_heads * visible_pairs(segments, everything, CAUSAL)
        for segments, group in zip(layout.group_segments, plan.replicas[0].groups, strict=True)
        for share in group.ranks
    )


def leaves(tokens: int, q_heads: int, kv_heads: int, head_dim: int) -> list[torch.Tensor]:
    """Return q, k, v and do of `tokens` rows on this GPU, in bf16."""
    return [
        torch.randn(tokens, heads, head_dim, device="cuda", dtype=torch.bfloat16)
        .requires_grad_(i < 3)
        for i, heads in enumerate((q_heads, kv_heads, kv_heads, q_heads))
    ]  # fmt: skip


def training(
    attend: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    do: torch.Tensor,
) -> Callable[[], object]:  # fmt: skip
    """Return a call that runs forward and backward."""

    def call() -> None:
        q.grad = k.grad = v.grad = None
        attend(q, k, v).backward(do)

    return call


def largest_error(context: ParallelContext, shape: Shape) -> float:
    """Return how far o, dq, dk and dv are from those of one GPU: the largest relative norm."""
    generator = torch.Generator("cuda").manual_seed(0)
    heads = {"q": shape.q_heads, "k": shape.kv_heads, "v": shape.kv_heads, "do": shape.q_heads}
    whole = {
        name: torch.randn(shape.tokens, count, shape.head_dim, device="cuda", generator=generator)
        .bfloat16()
        for name, count in heads.items()
    }  # fmt: skip
    cu_seqlens = torch.tensor([0, *shape.lengths]).cumsum(0)
    batch = context.shard(whole, cu_seqlens=cu_seqlens)
    q, k, v = (batch[name].requires_grad_() for name in "qkv")
    o = hexiseq_attention(q, k, v, context, batch.layout, causal=True)
    o.backward(batch["do"])
    found = [context.unshard(x.detach(), batch.layout) for x in (o, q.grad, k.grad, v.grad)]

    q, k, v = (whole[name].requires_grad_() for name in "qkv")
    o = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, None, None, causal=True)
    o.backward(whole["do"])
    differences = [
        float((a.float() - b.float()).norm() / b.float().norm())
        for a, b in zip(found, (o.detach(), q.grad, k.grad, v.grad), strict=True)
    ]
    return max(differences)


def planned(context: ParallelContext, shape: Shape) -> Callable[[], object]:
    """Return forward and backward of this rank under the context's plan."""
    layout = BatchLayout(context.plan, context.rank, shape.lengths)
    own = leaves(layout.num_tokens, shape.q_heads, shape.kv_heads, shape.head_dim)
    return training(lambda q, k, v: hexiseq_attention(q, k, v, context, layout, causal=True), *own)


def local(tokens: int, q_heads: int, kv_heads: int, head_dim: int) -> Callable[[], object]:
    """Return forward and backward over `tokens` tokens of one document on one GPU."""
    q, k, v, do = leaves(tokens, q_heads, kv_heads, head_dim)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_attn_func(q[None], k[None], v[None], causal=True)[0]  # type: ignore[index,return-value]

    return training(attend, q, k, v, do)
