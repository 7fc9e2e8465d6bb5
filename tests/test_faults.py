"""Nothing hangs: every rank ends with a clear error, and with the same one where all can see it."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from equality import planned, random_qkv
from faults import FIVE, SHORT, THREE, same_error
from pool import TIMEOUT, Pool

from hexiseq_triton.attention import hexiseq_attention
from hexiseq_triton.context import init
from hexiseq_triton.planner import Plan, Split


def one_rank_errs(rank: int, how: str) -> None:
    """Worker: a good call, then one in which rank 1 does something else; report the seconds."""
    context = init(THREE, device="cpu", timeout=SHORT)
    tensors = random_qkv(THREE, 40, 4, seed=0)
    planned(context, tensors, [40], causal=True)
    began = time.monotonic()
    try:
        # a rank that is killed right after it may leave others in here
        batch = context.shard(tensors, cu_seqlens=torch.tensor([0, 40]))
        q, k, v = (batch[name].requires_grad_() for name in "qkv")
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


def different_calls(rank: int, how: str) -> None:
    """Worker: ranks call attention with different options from the start."""
    with init(FIVE, device="cpu", timeout=TIMEOUT) as context:
        batch = context.shard(random_qkv(FIVE, 80, 4, seed=0), cu_seqlens=torch.tensor([0, 80]))
        q, k, v = (batch[name] for name in "qkv")
        if how == "dtype" and rank == 3:
            q, k, v = q.float(), k.float(), v.float()
        window = (4, 0) if how == "window" and rank == 3 else (-1, -1)
        q.requires_grad_(how == "gradients" and rank != 3)
        hexiseq_attention(q, k, v, context, batch.layout, causal=True, window_size=window)


@pytest.mark.parametrize("how", ["dtype", "window", "gradients"])
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
