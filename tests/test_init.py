"""`init` binds a plan to processes and devices, or ends on every rank with a clear error."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from equality import dense, planned, random_qkv
from faults import FIVE, SHORT, THREE, same_error
from pool import TIMEOUT, Pool, free_port

from hexiseq_triton.context import ParallelContext, init
from hexiseq_triton.devices import DeviceReport, local_device
from hexiseq_triton.errors import ConfigError, PeerError
from hexiseq_triton.planner import Plan, Split

FAST, SLOW = "Fast 80GB HBM", "Slow 40GB PCIe"


# -------------------------------------------------------------------- plans


def open_plan(rank: int, plans: Sequence[Any], options: dict[str, Any]) -> None:
    """Worker: bind this rank's plan."""
    init(plans[rank], device="cpu", timeout=TIMEOUT, **options).close()


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


# -------------------------------------------------------------------- devices


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


# -------------------------------------------------------------------- faults of one rank


def late(rank: int) -> None:
    """Worker: rank 2 never comes to `init`."""
    if rank != 2:
        init(THREE, device="cpu", timeout=timedelta(seconds=2))


def test_a_rank_that_does_not_come_is_named(fresh_pool: Pool) -> None:
    outcomes = fresh_pool.outcomes(late)
    for rank in (0, 1):
        assert outcomes[rank].kind == "PeerError"
        assert "ranks [2] did not reach 'init' within 2 s" in outcomes[rank].error


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


def in_a_world_of_ones_own(rank: int) -> list[str]:
    """Worker: which devices become current where the caller has initialised torch.distributed."""
    chosen: list[str] = []

    def note(device: torch.device) -> None:
        chosen.append(str(device))
        raise RuntimeError("no such GPU here")

    with (
        mock.patch("hexiseq_triton.context.local_device", return_value=torch.device("cuda", rank)),
        mock.patch("torch.cuda.set_device", note),
        pytest.raises((RuntimeError, PeerError)),
    ):
        init(THREE, timeout=SHORT)
    return chosen


def test_the_device_becomes_the_current_one(fresh_pool: Pool) -> None:
    found = fresh_pool.run(in_a_world_of_ones_own)
    assert found == [[f"cuda:{rank}"] for rank in range(len(found))]


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


def one_world_after_the_other(rank: int, port: int) -> tuple[list[float], bool]:
    """Worker: three times make a world, the last time for two contexts, the first closed first.

    Returns a mean of each context, and whether a world is left.
    """
    dist.destroy_process_group()  # the pool's
    told = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in told.items()}
    plan = Plan.from_splits([Split((5,), (2,)), Split((3,), (2,))], num_kv_heads=2)
    found = []
    for _ in range(2):
        with init(plan, device="cpu", timeout=SHORT) as context:
            found.append(mean_of(context))
    first, second = (init(plan, device="cpu", timeout=SHORT) for _ in range(2))
    found.append(mean_of(first))
    first.close()
    found.append(mean_of(second))
    second.close()
    return found, dist.is_initialized()


def mean_of(context: ParallelContext) -> float:
    """Return what all ranks take part in."""
    return float(context.token_mean(torch.tensor(1.0 + context.rank), 1, grad_average=1))


def test_a_process_may_make_one_world_after_the_other() -> None:
    """Under torchrun all meet at one store, in which the addresses of the last one stand."""
    with Pool(2) as two:
        assert two.run(one_world_after_the_other, free_port()) == [([1.5] * 4, False)] * 2
