"""One decoder layer of a 7b shape under a plan, and on one rank alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

import hexiseq_triton as hx
from hexiseq_triton.attention import hexiseq_attention
from hexiseq_triton.context import ParallelContext
from hexiseq_triton.flash import flash_attn_func
from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.llama import INIT_STD, Attend, Block, LlamaConfig
from hexiseq_triton.planner import Cluster, ModelSpec, Plan
from hexiseq_triton.planner.explain import cost_of
from hexiseq_triton.planner.problem import Work
from hexiseq_triton.planner.workload import Workload
from hexiseq_triton.rope import rope_tables

SHAPE = ModelSpec(layers=1, hidden=4096, heads=32, kv_heads=32, ffn=11008, vocab=256)
"""One layer of Llama 2's 7b shape; every query head has its own KV head."""
CHUNK_TOKENS, WINDOW = 8192, 2


def layer(device: torch.device) -> Block:
    """Return the layer in bf16, with the same weights on every rank."""
    torch.manual_seed(0)
    block = Block(LlamaConfig.from_spec(SHAPE), recompute=False).to(device, torch.bfloat16)
    with torch.no_grad():
        for parameter in block.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, INIT_STD)
    return block


def under_plan(block: Block, context: ParallelContext, num_tokens: int) -> Callable[[], object]:
    """Return forward and backward of this rank's part of one document."""
    layout = BatchLayout(context.plan, context.rank, (num_tokens,))
    ranges = [torch.arange(segment.start, segment.stop) for segment in layout.segments]
    positions = torch.cat(ranges) if ranges else torch.arange(0)
    attend = partial(hexiseq_attention, context=context, layout=layout, causal=True)
    return _training(block, attend, positions.to(context.device))


def alone(block: Block, num_tokens: int, device: torch.device) -> Callable[[], object]:
    """Return forward and backward of the whole document with all heads on this GPU."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = flash_attn_func(q[None], k[None], v[None], causal=True)
        assert isinstance(out, torch.Tensor)
        return out[0]

    return _training(block, attend, torch.arange(num_tokens, device=device))


def _training(block: Block, attend: Attend, positions: torch.Tensor) -> Callable[[], object]:
    x = torch.randn(len(positions), SHAPE.hidden, device=positions.device, dtype=torch.bfloat16)
    x.requires_grad_()
    gradient = torch.randn_like(x)
    rope = rope_tables(positions, SHAPE.head_dim, 10000.0)

    def call() -> None:
        x.grad = None
        block.zero_grad()
        block(x, rope, attend).backward(gradient)

    return call


def layer_flops(num_tokens: int) -> float:
    """Return the FLOPs of forward and backward of the layer over one causal document."""
    work = Work.of(SHAPE)
    pairs = num_tokens * (num_tokens + 1) / 2
    linear = (1 + Work.BACKWARD_LINEAR) * work.linear_per_token * num_tokens
    attention = (1 + Work.BACKWARD_ATTENTION) * work.attention_per_pair * SHAPE.heads * pairs
    return linear + attention


def planned(cluster: Cluster, num_tokens: int) -> Plan:
    """Return the planner's plan for this layer, for one sequence a step."""
    return hx.plan(cluster, SHAPE, seq_len=num_tokens, global_batch=1, recompute="none")


def predicted_seconds(plan: Plan, cluster: Cluster) -> float:
    """Return what the cost model says of forward and backward of the layer, FSDP left out."""
    workload = Workload(plan.seq_len, global_batch=1, accumulation=1, recompute="none")
    return float(cost_of(plan, cluster, SHAPE, workload).group_seconds.max())


def by_hand(
    num_tokens: int, groups: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]]
) -> Plan:
    """Return a plan of groups: ranks, shares of all tokens in 64ths, heads."""
    splits = [
        hx.Split(tuple(num_tokens * part // 64 for part in parts), tuple(heads), tuple(ranks))
        for ranks, parts, heads in groups
    ]
    exchange = hx.planner.ExchangePlan(chunk_tokens=CHUNK_TOKENS, window=WINDOW)
    return Plan.from_splits(
        splits, num_kv_heads=SHAPE.kv_heads, exchange=exchange, head_dim=SHAPE.head_dim
    )
