"""The runtime on real GPUs over NCCL: exact, for long, and with an end when a rank dies."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from equality import check_low_precision, largest_errors, random_qkv, this_device
from pool import TIMEOUT, Pool, free_port

from hexiseq_triton.attention import hexiseq_attention
from hexiseq_triton.context import init
from hexiseq_triton.corpus import Corpus, Pack
from hexiseq_triton.flash import flash_attn_varlen_func
from hexiseq_triton.planner import ExchangePlan, Plan, Split
from hexiseq_triton.single import SingleProcessTraining
from hexiseq_triton.train import Training, whole_gradients
from hexiseq_triton.training_config import CorpusOptions, TrainingConfig

NUM_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(NUM_GPUS < 2, reason="needs two NVIDIA GPUs or more"),
]
SMALL = ExchangePlan(chunk_tokens=23, window=3)


@pytest.fixture(scope="module")
def two() -> Iterator[Pool]:
    with Pool(2, backend="nccl") as started:
        yield started


@pytest.fixture(scope="module")
def four() -> Iterator[Pool]:
    if NUM_GPUS < 4:
        pytest.skip("needs four NVIDIA GPUs")
    with Pool(4, backend="nccl") as started:
        yield started


def by_hand(*replicas: list[Split], **options: Any) -> Plan:
    return Plan.from_splits(*replicas, num_kv_heads=4, **options)


def one(tokens: int) -> Split:
    """Return a group of one rank with all heads."""
    return Split((tokens,), (12,))


PLANS: dict[str, Plan] = {
    "2: heads": by_hand([Split((200, 200), (6, 6))]),
    "2: uneven heads": by_hand([Split((300, 100), (7, 5))]),
    "2: ring": by_hand([one(200), one(200)]),
    "2: uneven ring, small chunks": by_hand([one(299), one(101)], exchange=SMALL),
    "4: heads": by_hand([Split((100,) * 4, (3,) * 4)]),
    "4: no tokens here, no heads there": by_hand([Split((0, 150, 150, 100), (5, 0, 4, 3))]),
    "4: ring": by_hand([one(100)] * 4),
    "4: uneven ring": by_hand([one(300), one(101), one(101), one(101)]),
    "4: groups of 3 and 1": by_hand([Split((120, 40, 37), (7, 3, 2)), one(200)]),
    "4: groups of 2, small chunks": by_hand(
        [Split((120, 80), (7, 5)), Split((50, 150), (4, 8))], exchange=SMALL
    ),
    "4: two replicas and an idle rank": by_hand(
        [one(150), one(150)], [one(100)], sequences=(3, 1), world_size=4
    ),
}  # fmt: skip
BATCHES = {"one document": (400,), "packed": (131, 0, 1, 7, 200, 61)}
ONE_REPLICA = [name for name, plan in PLANS.items() if len(plan.replicas) == 1]


def pool_of(name: str, request: pytest.FixtureRequest) -> Pool:
    pool: Pool = request.getfixturevalue({"2": "two", "4": "four"}[name[0]])
    return pool


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", PLANS)
def test_plans_equal_dense_attention_in_float64(
    request: pytest.FixtureRequest, name: str, batch: str
) -> None:
    plan = PLANS[name]
    for options in ({"causal": True}, {"causal": False, "softcap": 2.0}):
        lengths = [BATCHES[batch]] * len(plan.replicas)
        found: list[Any] = pool_of(name, request).run(
            largest_errors, plan, lengths, 16, options, 7, "cuda"
        )
        errors = [error for rank in found for error in rank.values()]
        assert errors
        assert max(errors) <= 1e-10


LOW_PRECISION = [
    *((name, 128, torch.bfloat16) for name in ONE_REPLICA),
    ("2: uneven ring, small chunks", 64, torch.bfloat16),
    ("4: groups of 3 and 1", 64, torch.float16),
]
"""Other head sizes and dtypes, each with kernels of its own to compile, under one plan each."""


@pytest.mark.parametrize("symmetric_memory", [True, False], ids=["peer memory", "NCCL"])
@pytest.mark.parametrize(("name", "head_dim", "dtype"), LOW_PRECISION)
def test_kernels_under_a_plan_err_no_more_than_plain_attention(
    request: pytest.FixtureRequest,
    name: str,
    head_dim: int,
    dtype: torch.dtype,
    symmetric_memory: bool,
) -> None:
    pool_of(name, request).run(
        check_low_precision, PLANS[name], BATCHES["packed"], head_dim, dtype, "cuda",
        symmetric_memory,
    )  # fmt: skip


# -------------------------------------------------------------------- for long


LAYOUTS, ROUNDS = 20, 10


def random_layouts(rank: int, plans: list[Plan], seed: int) -> list[int]:
    """Worker: attention over random documents, ranks late at random; return bytes held.

    Each layout comes back in every round, so that what is kept for a layout is kept once.
    """
    torch.use_deterministic_algorithms(False)
    device = this_device("cuda", rank)
    late = random.Random(1000 * seed + rank)
    held = []
    contexts = [init(plan, device=device, timeout=TIMEOUT) for plan in plans]
    for _ in range(ROUNDS):
        draw = random.Random(seed)
        for i in range(LAYOUTS):
            lengths = [draw.randrange(1, 900) for _ in range(draw.randrange(1, 6))]
            if late.random() < 0.3:
                time.sleep(late.uniform(0, 0.02))
            if late.random() < 0.3:
                torch.cuda._sleep(late.randrange(20_000_000))  # the device too, up to 10 ms
            _check_against_one_gpu(contexts[i % len(contexts)], lengths, i)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_reserved() + torch.cuda.memory_allocated())
    for context in contexts:
        context.close()
    return held


def _check_against_one_gpu(context: Any, lengths: list[int], seed: int) -> None:
    tensors = random_qkv(context.plan, sum(lengths), 128, seed, torch.bfloat16)
    tensors = {name: x.to(context.device) for name, x in tensors.items()}
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    batch = context.shard(tensors, cu_seqlens=cu_seqlens)
    q, k, v = (batch[name].requires_grad_() for name in "qkv")
    o = hexiseq_attention(q, k, v, context, batch.layout, causal=True)
    o.backward(batch["do"])
    found = [context.unshard(x.detach(), batch.layout) for x in (o, q.grad, k.grad, v.grad)]

    q, k, v = (tensors[name].clone().requires_grad_() for name in "qkv")
    whole = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, None, None, causal=True)
    assert isinstance(whole, torch.Tensor)
    whole.backward(tensors["do"])
    for a, b in zip(found, (whole.detach(), q.grad, k.grad, v.grad), strict=True):
        assert b is not None
        assert (a.float() - b.float()).norm() <= 1e-2 * b.float().norm() + 1e-6


def test_late_ranks_and_changing_layouts_neither_hang_nor_take_more_memory(
    request: pytest.FixtureRequest,
) -> None:
    names = ["2: uneven heads", "2: uneven ring, small chunks", "2: ring"]
    if NUM_GPUS >= 4:
        names = ["4: heads", "4: groups of 3 and 1", "4: groups of 2, small chunks"]
    plans = [PLANS[name] for name in names]
    for held in pool_of(names[0], request).run(random_layouts, plans, 3):
        assert held[-1] <= held[1]  # caches are full after the first round


# -------------------------------------------------------------------- with FSDP2


def trained_with_prefetch(
    rank: int, plan: Plan, config: TrainingConfig
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Worker: train while FSDP2 fetches the next block's parameters beside attention."""
    torch.use_deterministic_algorithms(False)
    with init(plan, device=this_device("cuda", rank), timeout=TIMEOUT) as context:
        training = Training(context, config)
        blocks = list(training.model.blocks)
        for block, after in pairwise(blocks):
            block.set_modules_to_forward_prefetch([after])  # type: ignore[operator]
            after.set_modules_to_backward_prefetch([block])  # type: ignore[operator]
        losses = [float(training.backward())]
        gradients = {name: x.cpu() for name, x in whole_gradients(training).items()}
        training.update()
        losses += [training.step().loss for _ in range(config.steps - 1)]
        return losses, gradients


@pytest.mark.parametrize("name", ["2: uneven heads", "4: groups of 3 and 1", "4: uneven ring"])
def test_training_with_prefetch_equals_one_process(
    request: pytest.FixtureRequest, name: str, tmp_path: Path
) -> None:
    model = tmp_path / "model.yaml"
    model.write_text("{layers: 3, hidden: 96, heads: 12, kv_heads: 4, ffn: 128, vocab: 256}")
    config = TrainingConfig(
        model=str(model), steps=4, lr=2e-3, warmup_steps=1, out=str(tmp_path / "out"),
        timeout_seconds=TIMEOUT.total_seconds(), corpus=CorpusOptions(max_document_tokens=300),
    )  # fmt: skip
    plan = PLANS[name]
    results = pool_of(name, request).run(trained_with_prefetch, plan, config)

    single = SingleProcessTraining(plan, config, "cpu")
    expected = [single.backward()]
    gradients = {name: p.grad.clone() for name, p in single.model.named_parameters()}
    single.update()
    expected += [single.step() for _ in range(config.steps - 1)]
    for losses, _ in results:
        assert losses == results[0][0]
        assert losses == pytest.approx(expected, rel=1e-5)
    for key, gradient in gradients.items():
        assert (results[0][1][key] - gradient).norm() <= 1e-4 * gradient.norm(), key


# -------------------------------------------------------------------- in bf16, for 50 steps


class _LastFirst(Corpus):
    """The same documents, the last of a sequence first: sums over tokens run in another order."""

    def sequences(self, indices: range, seq_len: int, origin: int = 0) -> Pack:
        tokens, cu_seqlens = super().sequences(indices, seq_len, origin)
        documents = tokens.split(cu_seqlens.diff().tolist())[::-1]
        lengths = [0, *(len(document) for document in documents)]
        return Pack(torch.cat([tokens[:0], *documents]), torch.tensor(lengths).cumsum(0).int())


def bf16_losses(
    rank: int, plan: Plan, config: TrainingConfig, device: str, *, last_first: bool
) -> list[float]:
    """Worker: train in bf16; return the loss of each step."""
    torch.use_deterministic_algorithms(False)
    with init(plan, device=this_device(device, rank), timeout=TIMEOUT) as context:
        training = Training(context, config)
        if last_first:
            training.corpus.__class__ = _LastFirst
        return [training.step().loss for _ in range(config.steps)]


def check_bf16_drift(pool: Pool, plan: Plan, config: TrainingConfig, device: str) -> None:
    """Hold a plan's losses against those of one of the GPUs, the others idle."""
    alone = by_hand([one(plan.seq_len)], world_size=plan.world_size)
    runs = ((alone, False), (alone, True), (plan, False))
    whole, other_order, found = (
        pool.run(partial(bf16_losses, last_first=last_first), each, config, device)[0]
        for each, last_first in runs
    )

    def drift(losses: list[float]) -> float:
        return fmean(abs(a - b) for a, b in zip(losses, whole, strict=True))

    assert 0.0 < drift(found) <= 2 * drift(other_order)


@pytest.mark.parametrize("name", ["2: uneven heads", "4: groups of 3 and 1"])
def test_bf16_drifts_no_more_than_sums_in_another_order(
    request: pytest.FixtureRequest, name: str, tmp_path: Path
) -> None:
    model = tmp_path / "model.yaml"
    model.write_text("{layers: 2, hidden: 1536, heads: 12, kv_heads: 4, ffn: 512, vocab: 256}")
    config = TrainingConfig(
        model=str(model), steps=50, lr=1e-3, warmup_steps=5, dtype="bf16",
        out=str(tmp_path / "out"), timeout_seconds=TIMEOUT.total_seconds(),
        corpus=CorpusOptions(max_document_tokens=300),
    )  # fmt: skip
    check_bf16_drift(pool_of(name, request), PLANS[name], config, "cuda")


# -------------------------------------------------------------------- when a rank dies


KILL_TIMEOUT_SECONDS = 8


def test_killing_a_rank_ends_the_others_within_the_timeout() -> None:
    cases = [(plan, path) for plan in ("heads", "ring") for path in ("peer memory", "nccl")]
    with ThreadPoolExecutor() as side_by_side:
        for text in side_by_side.map(left_alone, *zip(*cases, strict=True)):
            assert "attending without the others" in text  # it was waiting for them
            reason = r"timeout|timed out|failed to receive|remote process|PeerError"
            assert re.search(reason, text), text


def left_alone(plan: str, path: str) -> str:
    """Start two ranks of which one is killed; return what the other says until it ends in time."""
    port = str(free_port())
    script = Path(__file__).with_name("killed_rank.py")
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), plan, path, str(KILL_TIMEOUT_SECONDS)],
            env=os.environ
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        assert processes[1].wait(timeout=120) == -signal.SIGKILL
        text, _ = processes[0].communicate(timeout=KILL_TIMEOUT_SECONDS + 10)
    finally:
        for process in processes:
            process.kill()
            process.communicate()  # closes its pipe
    assert processes[0].returncode != 0
    return text
