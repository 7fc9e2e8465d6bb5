"""The ends of the plan space are the known schemes: one group is Ulysses, groups of one are a ring.

Both are written here the textbook way, on plain collectives.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from dense import dense_attention
from equality import random_qkv
from pool import TIMEOUT, Pool

from hexiseq_triton.attention import hexiseq_attention
from hexiseq_triton.context import init
from hexiseq_triton.planner import ExchangePlan, Plan, Split

WORLD, TOKENS, HEADS, HEAD_DIM = 5, 65, 10, 4
CONTIGUOUS = ExchangePlan("contiguous")


def ulysses(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Sequence shards to head shards by all-to-all, dense attention, and back."""

    def all_to_all(x: torch.Tensor) -> torch.Tensor:  # [world, ...] to [world, ...]
        x = x.contiguous()
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x)
        return received

    heads = HEADS // WORLD
    gathered = []
    for name in "qkv":
        x = tensors[name]  # [t, H, D]
        x = x.view(-1, WORLD, heads, HEAD_DIM).transpose(0, 1)
        gathered.append(all_to_all(x).flatten(0, 1))
    o = dense_attention(*gathered, [TOKENS], causal=True)
    return all_to_all(o.view(WORLD, -1, heads, HEAD_DIM)).transpose(0, 1).flatten(1, 2)


def ring(tensors: dict[str, torch.Tensor], rank: int) -> torch.Tensor:
    """Rotate contiguous KV shards and merge the partial results by their log-sum-exp."""
    q, k, v = (tensors[name] for name in "qkv")
    rows = q.shape[0]
    o, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf, dtype=q.dtype)
    for step in range(WORLD):
        owner = (rank - step) % WORLD
        if owner <= rank:
            scores = torch.einsum("qhd,khd->qhk", q, k) * HEAD_DIM**-0.5
            if owner == rank:
                hidden = torch.ones(rows, rows, dtype=torch.bool).triu(1)
                scores = scores.masked_fill(hidden[:, None], -torch.inf)
            part = torch.einsum("qhk,khd->qhd", scores.softmax(-1), v)
            part_lse = scores.logsumexp(-1)
            weight = torch.sigmoid(part_lse - lse)[..., None]
            o, lse = o + weight * (part - o), torch.logaddexp(lse, part_lse)
        packed = torch.stack((k, v))
        received = torch.empty_like(packed)
        right = dist.isend(packed, (rank + 1) % WORLD)
        dist.recv(received, (rank - 1) % WORLD)
        right.wait()
        k, v = received
    return o


def compare(rank: int, scheme: str) -> float:
    """Worker: return the largest difference between the plan's output and the scheme's."""
    shard = TOKENS // WORLD
    if scheme == "ulysses":
        plan = Plan.from_splits([Split((shard,) * WORLD, (HEADS // WORLD,) * WORLD)])
    else:
        plan = Plan.from_splits([Split((shard,), (HEADS,))] * WORLD, exchange=CONTIGUOUS)
    with init(plan, device="cpu", timeout=TIMEOUT) as context:
        tensors = random_qkv(plan, TOKENS, HEAD_DIM, seed=0)
        mine = {name: x[rank * shard : (rank + 1) * shard] for name, x in tensors.items()}
        batch = context.shard(tensors, cu_seqlens=torch.tensor([0, TOKENS]))
        if scheme == "ulysses":  # the group's rows are the stream: one group holds all of it
            assert torch.equal(batch["q"], mine["q"])
        found = hexiseq_attention(
            batch["q"], batch["k"], batch["v"], context, batch.layout, causal=True
        )
        expected = ulysses(mine) if scheme == "ulysses" else ring(mine, rank)
        return float((found - expected).abs().max())


@pytest.mark.parametrize("scheme", ["ulysses", "ring"])
def test_the_ends_of_the_plan_space_are_the_known_schemes(pool: Pool, scheme: str) -> None:
    assert max(pool.run(compare, scheme)) <= 1e-12
