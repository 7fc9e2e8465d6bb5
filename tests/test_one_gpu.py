"""Transfers by peer memory where there is one GPU: processes share it, with gloo beside it.

The kernels, the mapped buffers and their barriers are those of several GPUs. What one GPU can't
show is writes that are still on their way when a barrier is passed.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
from assertions import assert_as_close_as
from equality import dense, random_qkv
from pool import Pool

from hexiseq_triton.attention import hexiseq_attention
from hexiseq_triton.context import ParallelContext, init
from hexiseq_triton.planner import Plan, Split
from hexiseq_triton.timeline import Timeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
TIMEOUT = timedelta(seconds=120)  # kernels are compiled meanwhile
SPLITS = {
    "KV heads apart": [Split((300, 101, 90), (6, 3, 3))],
    "a KV head shared, and no tokens": [Split((90, 0, 130), (8, 2, 2))],
    "groups that exchange keys": [Split((120, 80), (7, 5)), Split((200,), (12,))],
}
"""Of the last one, two ranks map one group's memory before they map that of all three."""
PACKED = (131, 0, 1, 7, 200, 61), (17, 5), (640,), (300, 340)


@pytest.fixture(scope="module")
def three() -> Iterator[Pool]:
    with (
        patch.dict(os.environ, TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1"),
        Pool(3, afresh=True) as started,
    ):
        yield started


def on_one_gpu(plan: Plan) -> ParallelContext:
    """Return a context whose attention goes by memory of GPU 0, and all else by gloo."""
    context = init(plan, device="cpu", timeout=TIMEOUT)
    context.device = torch.device("cuda", 0)
    context.timeline = Timeline(context.device)
    context.share_memory(TIMEOUT)
    assert "NCCL" not in context.paths
    return context


def check_layers(rank: int, plan: Plan, head_dim: int, dtype: torch.dtype) -> None:
    """Worker: layers forward, and back in the other order, while ranks come late at random."""
    torch.use_deterministic_algorithms(False)
    late = random.Random(rank)

    def come_late() -> None:
        if late.random() < 0.5:
            torch.cuda._sleep(late.randrange(20_000_000))  # up to 10 ms

    layers = []
    with on_one_gpu(plan) as context:
        for seed, lengths in enumerate(PACKED):
            tensors = random_qkv(plan, sum(lengths), head_dim, seed, dtype)
            batch = context.shard(tensors, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0))
            leaves = [batch[name].requires_grad_() for name in "qkv"]
            come_late()
            o = hexiseq_attention(*leaves, context, batch.layout, causal=True)
            layers.append((tensors, lengths, batch, leaves, o))
        for tensors, lengths, batch, leaves, o in reversed(layers):
            come_late()
            o.backward(batch["do"])
            again = hexiseq_attention(*leaves, context, batch.layout, causal=True)
            assert torch.equal(again, o)
            found = [
                context.unshard(x.detach().cpu(), batch.layout)
                for x in (o, *(leaf.grad for leaf in leaves))
            ]
            exact = dense({k: x.double() for k, x in tensors.items()}, lengths, causal=True)
            plain = dense(tensors, lengths, causal=True)
            for each in zip(found, exact, plain, strict=True):
                assert_as_close_as(*each)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("split", SPLITS)
def test_processes_on_one_gpu_attend_as_one(three: Pool, split: str, head_dim: int) -> None:
    plan = Plan.from_splits(SPLITS[split], num_kv_heads=4)
    three.run(check_layers, plan, head_dim, torch.bfloat16)
