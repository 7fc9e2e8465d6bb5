"""Nothing hangs: every rank ends with a clear error, and with the same one where all can see it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from equality import dense, planned, random_qkv
from pool import TIMEOUT, Outcome, Pool

from hexiseq_triton.attention import hexiseq_attention
from hexiseq_triton.context import init
from hexiseq_triton.devices import DeviceReport, local_device
from hexiseq_triton.errors import ConfigError
from hexiseq_triton.planner import Plan, Split

FIVE = Plan.from_splits([Split((20, 12, 8), (3, 3, 2)), Split((24, 16), (4, 4))], num_kv_heads=2)
THREE = Plan.from_splits([Split((20, 12), (3, 5)), Split((8,), (8,))], num_kv_heads=2)
SHORT = timedelta(seconds=8)
FAST, SLOW = "Fast 80GB HBM", "Slow 40GB PCIe"


def open_plan(rank: int, plans: Sequence[Any], options: dict[str, Any]) -> None:
    """Worker: bind this rank's plan."""
    init(plans[rank], device="cpu", timeout=TIMEOUT, **options).close()


def same_error(outcomes: Sequence[Outcome]) -> tuple[str, str]:
    """Return the kind and text of the error that every rank raised."""
    found = {(outcome.kind, outcome.error) for outcome in outcomes}
    assert len(found) == 1, found
    return found.pop()


def test_ranks_with_different_plans_raise_the_same_error(pool: Pool) -> None:
    other = Plan.from_splits(
        [Split((20, 12, 8), (3, 2, 3)), Split((24, 16), (4, 4))], num_kv_heads=2
    )
    kind, text = same_error(pool.outcomes(open_plan, [FIVE, FIVE, other, FIVE, FIVE], {}))
    assert kind == "PlanError"
    assert "ranks hold different plans" in text


def test_a_plan_for_another_world_raises_on_every_rank(pool: Pool) -> None:
    kind, text = same_error(pool.outcomes(open_plan, [THREE] * 5, {}))
    assert kind == "PlanError"
    assert "the plan is for 3 ranks; 5 processes run" in text


def test_a_file_edited_on_one_rank_raises_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    FIVE.save(good)
    bad.write_text(FIVE.to_json().replace('"tokens": 12', '"tokens": 13'))
    kind, text = same_error(pool.outcomes(open_plan, [good, good, bad, good, good], {}))
    assert kind == "PlanError"
    assert text.startswith(f"rank 2 failed: {bad}: was edited")


def test_a_plan_that_contradicts_itself_raises_on_every_rank(pool: Pool) -> None:
    broken = replace(FIVE, seq_len=99)
    kind, text = same_error(pool.outcomes(open_plan, [broken] * 5, {}))
    assert kind == "PlanError"
    assert "replica 0 holds 80 tokens; 1 sequences of 99 are 99" in text


def open_on_devices(rank: int, plan: Plan, reports: Sequence[DeviceReport], remap: bool) -> int:
    """Worker: bind the plan as if this process had a given device; return the plan's rank."""
    with (
        mock.patch("hexiseq_triton.context.describe_device", return_value=reports[rank]),
        init(plan, device="cpu", timeout=TIMEOUT, remap=remap) as context,
    ):
        tensors = random_qkv(plan, 80, 4, seed=0)
        planned(context, tensors, [80], causal=True)  # the groups follow the permutation
        return context.rank


def on_gpus(gpus: Sequence[str]) -> Plan:
    """Return FIVE with GPU models, two nodes of 3 and 2 ranks."""
    groups = []
    for node, group in zip("ab", FIVE.replicas[0].groups, strict=True):
        shares = tuple(
            replace(share, gpu=gpus[share.rank], node=node, memory_limit_bytes=10**9)
            for share in group.ranks
        )
        groups.append(replace(group, ranks=shares))
    names = {"fast": (FAST,), "slow": (SLOW,)}
    return replace(
        FIVE,
        replicas=(replace(FIVE.replicas[0], groups=tuple(groups)),),
        device_names=names,
    )


PLANNED = on_gpus(["fast", "slow", "slow", "fast", "fast"])
SHUFFLED = [
    DeviceReport("x", FAST, 2 * 10**9),
    DeviceReport("x", FAST, 2 * 10**9),
    DeviceReport("y", SLOW, 2 * 10**9),
    DeviceReport("y", SLOW, 2 * 10**9),
    DeviceReport("y", FAST, 2 * 10**9),
]


def test_devices_that_are_not_the_plans_raise_with_both_tables(pool: Pool) -> None:
    kind, text = same_error(pool.outcomes(open_on_devices, PLANNED, SHUFFLED, False))
    assert kind == "PlanError"
    assert "rank 1: slow on node a, 0.9 GiB needed" in text
    assert "process 1: Fast 80GB HBM on host x, 1.9 GiB" in text
    assert "remap=True" in text


def test_remap_runs_each_rank_on_a_device_of_its_model(pool: Pool) -> None:
    # node a (fast, slow, slow) runs on host y, node b on host x
    assert pool.run(open_on_devices, PLANNED, SHUFFLED, True) == [3, 4, 1, 2, 0]


def test_remap_refuses_devices_that_fit_in_no_order(pool: Pool) -> None:
    poor = [*SHUFFLED[:4], DeviceReport("y", FAST, 10**8)]
    kind, text = same_error(pool.outcomes(open_on_devices, PLANNED, poor, True))
    assert kind == "PlanError"
    assert "no order of the processes fits" in text


def two_contexts(rank: int) -> float:
    """Worker: interleave attention under two plans of different head counts."""
    other = Plan.from_splits([Split((30,), (3,)), Split((10, 5, 20, 15), (1, 1, 0, 1))])
    worst = 0.0
    with (
        init(FIVE, device="cpu", timeout=TIMEOUT) as a,
        init(other, device="cpu", timeout=TIMEOUT) as b,
    ):
        for turn in range(3):
            for context, lengths in ((a, [80]), (b, [33, 47])):
                tensors = random_qkv(context.plan, 80, 4, seed=turn)
                found = planned(context, tensors, lengths, causal=True)
                expected = dense(tensors, lengths, causal=True)
                for x, y in zip(found, expected, strict=True):
                    worst = max(worst, float((x - y).abs().max()))
    return worst


def test_two_contexts_interleave_in_one_process(pool: Pool) -> None:
    assert max(pool.run(two_contexts)) <= 1e-10


# -------------------------------------------------------------------- faults in mid-run


def one_rank_errs(rank: int, how: str) -> None:
    """Worker: a good call, then one in which rank 1 does something else; report the seconds."""
    context = init(THREE, device="cpu", timeout=SHORT)
    tensors = random_qkv(THREE, 40, 4, seed=0)
    planned(context, tensors, [40], causal=True)
    began = time.monotonic()
    try:
        # a rank that is killed right after it may leave others in here
        batch = context.shard(tensors, cu_seqlens=torch.tensor([0, 40]))
        q, k, v = (batch[name] for name in "qkv")
        began = time.monotonic()
        if rank == 1 and how == "dtype":
            q, k, v = q.float(), k.float(), v.float()
        if rank == 1 and how == "shape":
            q = q[:-1]
        if how.endswith("killed in mid-batch"):  # where nothing is agreed on any more
            hexiseq_attention(q, k, v, context, batch.layout, causal=True)
        if how.startswith(f"rank {rank} killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        hexiseq_attention(q, k, v, context, batch.layout, causal=True)
    except Exception as error:
        again = None
        try:
            context.shard(tensors)
        except Exception as later:
            again = str(later)
        raise type(error)(f"{time.monotonic() - began:.1f}|{error}|{again}") from error


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("dtype", "rank 1: InputError: attention got torch.float32 with head_dim 4 on rank 1"),
        ("shape", "rank 1: InputError: q has shape (11, 8, 4) on rank 1"),
    ],
)
def test_a_fault_on_one_rank_ends_the_others_with_its_message(
    fresh_pool: Pool, how: str, says: str
) -> None:
    outcomes = fresh_pool.outcomes(one_rank_errs, how)
    seconds = [float(outcome.error.split("|")[0]) for outcome in outcomes]
    assert [outcome.kind for outcome in outcomes] == ["PeerError", "InputError", "PeerError"]
    assert seconds[1] < 3.0  # at once
    assert max(seconds) < SHORT.total_seconds() + 10
    for rank in (0, 2):
        assert outcomes[rank].error.split("|")[1].startswith(says)
    for outcome in outcomes:  # and the context stays closed
        assert "this context failed before: rank 1: InputError" in outcome.error.split("|")[2]


@pytest.mark.parametrize(
    ("killed", "when", "says"),
    [
        (1, "", "ranks [1] did not reach 'batch/0' within 8 s"),
        (0, "", "failed"),  # its process holds the store
        (1, " in mid-batch", "failed"),
        (0, " in mid-batch", "failed"),
    ],
)
def test_killing_a_rank_ends_the_others(
    fresh_pool: Pool, killed: int, when: str, says: str
) -> None:
    outcomes = fresh_pool.outcomes(one_rank_errs, f"rank {killed} killed{when}")
    for rank, outcome in enumerate(outcomes):
        if rank == killed:
            assert outcome.kind == "Died"
            continue
        assert outcome.kind == "PeerError"
        seconds, text, _ = outcome.error.split("|")
        assert float(seconds) < SHORT.total_seconds() + 10
        assert says in text


def late(rank: int) -> None:
    """Worker: rank 2 never comes to `init`."""
    if rank != 2:
        init(THREE, device="cpu", timeout=timedelta(seconds=2))


def test_a_rank_that_does_not_come_is_named(fresh_pool: Pool) -> None:
    outcomes = fresh_pool.outcomes(late)
    for rank in (0, 1):
        assert outcomes[rank].kind == "PeerError"
        assert "ranks [2] did not reach 'init' within 2 s" in outcomes[rank].error


def different_calls(rank: int, how: str) -> None:
    """Worker: ranks call attention with different options from the start."""
    with init(FIVE, device="cpu", timeout=TIMEOUT) as context:
        batch = context.shard(random_qkv(FIVE, 80, 4, seed=0), cu_seqlens=torch.tensor([0, 80]))
        q, k, v = (batch[name] for name in "qkv")
        if how == "dtype" and rank == 3:
            q, k, v = q.float(), k.float(), v.float()
        window = (4, 0) if how == "window" and rank == 3 else (-1, -1)
        hexiseq_attention(q, k, v, context, batch.layout, causal=True, window_size=window)


@pytest.mark.parametrize("how", ["dtype", "window"])
def test_ranks_that_call_attention_differently_agree_that_they_do(pool: Pool, how: str) -> None:
    kind, text = same_error(pool.outcomes(different_calls, how))
    assert kind == "InputError"
    assert text.startswith("ranks call attention differently\n  rank 0: ")


def different_batches(rank: int) -> None:
    """Worker: rank 3 attends over the second batch first; both have the same lengths."""
    with init(FIVE, device="cpu", timeout=TIMEOUT) as context:
        bounds = torch.tensor([0, 80])
        first, second = (
            context.shard(random_qkv(FIVE, 80, 4, seed=seed), cu_seqlens=bounds) for seed in (0, 1)
        )
        for batch in (second, first) if rank == 3 else (first, second):
            hexiseq_attention(*(batch[name] for name in "qkv"), context, batch.layout)


def test_ranks_that_attend_over_different_batches_agree_that_they_do(pool: Pool) -> None:
    kind, text = same_error(pool.outcomes(different_batches))
    assert kind == "InputError"
    assert text.startswith("the ranks of replica 0 attend over different batches; ")
    assert "\n  rank 2: batch 0 of 80 tokens in 1 documents (" in text
    assert "\n  rank 3: batch 1 of 80 tokens in 1 documents (" in text


def one_rank_stops(rank: int, then: str) -> None:
    """Worker: the user's own code fails on rank 1, the others go on."""
    with init(THREE, device="cpu", timeout=SHORT) as context:
        tensors, bounds = random_qkv(THREE, 40, 4, seed=0), torch.tensor([0, 40])
        batch = context.shard(tensors, cu_seqlens=bounds)
        if rank == 1:
            raise KeyError("out of books")
        if then == "shard":
            context.shard(tensors, cu_seqlens=bounds)
        elif then == "token_mean":
            context.token_mean(torch.tensor(1.0), 1, grad_average=1)
        else:
            hexiseq_attention(*(batch[name] for name in "qkv"), context, batch.layout)


@pytest.mark.parametrize("then", ["shard", "token_mean", "attention"])
def test_what_ends_a_rank_outside_of_our_calls_reaches_the_others(
    fresh_pool: Pool, then: str
) -> None:
    outcomes = fresh_pool.outcomes(one_rank_stops, then)
    assert [outcome.kind for outcome in outcomes] == ["PeerError", "KeyError", "PeerError"]
    for rank in (0, 2):
        assert outcomes[rank].error == "rank 1: KeyError: 'out of books'"


def one_has_no_device(rank: int) -> None:
    """Worker: rank 1 finds no device."""
    found = [DeviceReport("x", "cpu", 0), AssertionError("no driver"), DeviceReport("x", "cpu", 0)]
    with mock.patch("hexiseq_triton.context.describe_device", side_effect=[found[rank]]):
        init(THREE, device="cpu", timeout=SHORT)


def test_a_rank_that_fails_within_init_tells_the_others(fresh_pool: Pool) -> None:
    outcomes = fresh_pool.outcomes(one_has_no_device)
    assert [outcome.kind for outcome in outcomes] == ["PeerError", "AssertionError", "PeerError"]
    assert {outcomes[rank].error for rank in (0, 2)} == {"rank 1: AssertionError: no driver"}


def one_has_another_device(rank: int) -> None:
    """Worker: rank 1 asks for what the package does not run on."""
    init(THREE, device="xpu" if rank == 1 else "cpu", timeout=TIMEOUT)


def test_a_device_that_is_none_reaches_the_others(fresh_pool: Pool) -> None:
    began = time.monotonic()
    outcomes = fresh_pool.outcomes(one_has_another_device)
    assert time.monotonic() - began < TIMEOUT.total_seconds() / 2  # nobody waited for it
    assert [outcome.kind for outcome in outcomes] == ["PeerError", "ConfigError", "PeerError"]
    assert "device is xpu; the package runs on cuda and cpu" in outcomes[0].error


@pytest.mark.parametrize(
    ("asked", "local_rank", "found"),
    [
        ("cuda", "2", "cuda:2"),
        (None, "2", "cuda:2"),
        ("cuda:1", "2", "cuda:1"),
        ("cuda", None, "cuda:3"),
        ("cpu", "2", "cpu"),
        ("cuda", "4", "LOCAL_RANK is 4; PyTorch finds 4 GPUs on "),
        ("cuda:7", "0", "the device's number is 7; PyTorch finds 4 GPUs on "),
        ("gpu", "0", "device is 'gpu'; it is cuda, cuda:0 or cpu"),
    ],
)
def test_the_device_is_the_local_gpu_unless_another_is_named(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, local_rank: str | None, found: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    if " " not in found:
        assert str(local_device(asked)) == found
        return
    with pytest.raises(ConfigError, match=re.escape(found)):
        local_device(asked)


def test_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device is cuda; PyTorch finds no GPU here"):
        local_device("cuda")


def one_names_no_device(rank: int) -> bool:
    """Worker: rank 1 fails before it could tell anybody; then all try again."""
    try:
        init(FIVE, device="gpu" if rank == 1 else "cpu", timeout=timedelta(seconds=1))
    except (RuntimeError, ValueError):
        init(FIVE, device="cpu", timeout=TIMEOUT).close()
        return True
    return False


def test_an_init_that_failed_on_one_rank_can_be_tried_again(pool: Pool) -> None:
    assert pool.run(one_names_no_device) == [True] * 5


def use_when_closed(rank: int, call: str) -> None:
    """Worker: use a context after its end."""
    with init(FIVE, device="cpu", timeout=TIMEOUT) as context:
        batch = context.shard(random_qkv(FIVE, 80, 4, seed=0), cu_seqlens=torch.tensor([0, 80]))
    if call == "token_mean":
        context.token_mean(torch.tensor(float(rank)), 1, grad_average=1)
    else:
        hexiseq_attention(*(batch[name] for name in "qkv"), context, batch.layout)


@pytest.mark.parametrize("call", ["token_mean", "attention"])
def test_a_closed_context_says_so(pool: Pool, call: str) -> None:
    kind, text = same_error(pool.outcomes(use_when_closed, call))
    assert kind == "InputError"
    assert text.startswith("this context is closed")


def idle_ranks_shard(rank: int) -> list[list[str]]:
    """Worker: agree many times; the idle ranks with nobody but themselves."""
    plan = Plan.from_splits([Split((5, 5), (4, 4))], world_size=5)
    with init(plan, device="cpu", timeout=SHORT) as context:
        return [context.gather_in_replica("turn", f"{rank} {turn}") for turn in range(300)]


def test_idle_ranks_do_not_take_part_in_each_others_agreement(pool: Pool) -> None:
    found = pool.run(idle_ranks_shard)
    for rank in (2, 3, 4):
        assert found[rank] == [[f"{rank} {turn}"] for turn in range(300)]


def attend_wrongly(rank: int, how: str) -> None:
    """Worker: ask attention for what it cannot do."""
    with init(FIVE, device="cpu", timeout=TIMEOUT) as context:
        batch = context.shard(random_qkv(FIVE, 80, 4, seed=0), cu_seqlens=torch.tensor([0, 80]))
        q, k, v = (batch[name].requires_grad_() for name in "qkv")
        scale = -0.5 if how == "scale" else None
        o = hexiseq_attention(q, k, v, context, batch.layout, softmax_scale=scale)
        torch.autograd.grad(o.sum(), q, create_graph=True)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("scale", "softmax_scale is -0.5; it must be positive"),
        ("create_graph", "attention's gradients cannot be differentiated again"),
    ],
)
def test_what_attention_would_do_wrongly_is_refused(pool: Pool, how: str, says: str) -> None:
    kind, text = same_error(pool.outcomes(attend_wrongly, how))
    assert kind == "InputError"
    assert text.startswith(says)
