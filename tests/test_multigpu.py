"""The same equality on NCCL: attention under a plan equals dense attention, on real GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from equality import check_low_precision, largest_errors
from pool import Pool

from hexiseq_triton.planner import ExchangePlan, Plan, Split

NUM_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(NUM_GPUS < 2, reason="needs two NVIDIA GPUs or more"),
]
WORLD = 4 if NUM_GPUS >= 4 else 2


@pytest.fixture(scope="module")
def gpus() -> Iterator[Pool]:
    with Pool(WORLD, backend="nccl") as started:
        yield started


PLANS: dict[str, Plan] = {
    "pure heads": Plan.from_splits([Split((100,) * WORLD, (12 // WORLD,) * WORLD)], num_kv_heads=4),
    "pure ring": Plan.from_splits([Split((100,), (12,))] * WORLD, num_kv_heads=4),
    "uneven ring": Plan.from_splits(
        [Split((300,), (12,)), *([Split((101,), (12,))] * (WORLD - 1))], num_kv_heads=4
    ),
}
if WORLD == 4:
    PLANS["groups of 3 and 1"] = Plan.from_splits(
        [Split((120, 40, 37), (7, 3, 2)), Split((200,), (12,))], num_kv_heads=4
    )
    PLANS["2 x 2, small chunks"] = Plan.from_splits(
        [Split((120, 80), (7, 5)), Split((50, 150), (4, 8))],
        num_kv_heads=4,
        exchange=ExchangePlan(chunk_tokens=23, window=3),
    )
    PLANS["two replicas and an idle rank"] = Plan.from_splits(
        [Split((150,), (12,)), Split((150,), (12,))],
        [Split((100,), (12,))],
        num_kv_heads=4,
        sequences=(3, 1),
        world_size=4,
    )

BATCHES = {"one document": (400,), "packed": (131, 0, 1, 7, 200, 61)}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", PLANS)
def test_plans_equal_dense_attention_on_nccl(gpus: Pool, name: str, batch: str) -> None:
    plan = PLANS[name]
    for options in ({"causal": True}, {"causal": False, "softcap": 2.0}):
        lengths = [BATCHES[batch]] * len(plan.replicas)
        found: list[Any] = gpus.run(largest_errors, plan, lengths, 16, options, 7, "cuda")
        errors = [error for rank in found for error in rank.values()]
        assert errors
        assert max(errors) <= 1e-10


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [name for name in PLANS if len(PLANS[name].replicas) == 1])
def test_kernels_under_a_plan_err_no_more_than_plain_attention(
    gpus: Pool, name: str, dtype: torch.dtype, head_dim: int
) -> None:
    gpus.run(check_low_precision, PLANS[name], BATCHES["packed"], head_dim, dtype, "cuda")
