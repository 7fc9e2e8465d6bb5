"""The token mean: right in value on every rank, right in gradient under an averaging wrapper."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from pool import TIMEOUT, Pool
from torch.utils.checkpoint import checkpoint

from hexiseq_triton.context import init
from hexiseq_triton.planner import Plan, Split

PLAN = Plan.from_splits([Split((1, 9, 0), (1, 1, 2)), Split((4,), (4,))], world_size=5)
REPLICAS = Plan.from_splits(
    [Split((10,), (2,)), Split((2,), (2,))], [Split((2, 2), (1, 1))], sequences=(3, 1), world_size=5
)


def losses_of(rank: int, step: int, counts: Sequence[int]) -> torch.Tensor:
    """Return the token losses of a rank as a function of w = 1: a_i w."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.rand(counts[rank], generator=generator, dtype=torch.float64)


def mean_and_gradient(
    rank: int, plan: Plan, counts_of_step: Sequence[Sequence[int]], averaged: bool
) -> tuple[float, float]:
    """Worker: the mean over all steps, and d mean / d w after the wrapper's reduction."""
    with init(plan, device="cpu", timeout=TIMEOUT) as context:
        w = torch.ones((), dtype=torch.float64, requires_grad=True)
        tokens = sum(counts[rank] for counts in counts_of_step)
        mean = 0.0
        for step, counts in enumerate(counts_of_step):
            loss_sum = (losses_of(rank, step, counts) * w).sum()
            loss = context.token_mean(loss_sum, tokens, grad_average=5 if averaged else 1)
            loss.backward()
            mean += loss.item()
        assert w.grad is not None
        torch.distributed.all_reduce(w.grad, group=context.world_group)
        return mean, float(w.grad / 5 if averaged else w.grad)


@pytest.mark.parametrize("plan", [PLAN, REPLICAS], ids=["one replica", "replicas 3:1"])
@pytest.mark.parametrize("averaged", [True, False])
@pytest.mark.parametrize(
    "counts", [[(1, 9, 0, 4, 0)], [(1, 9, 0, 4, 0), (3, 0, 0, 1, 0), (0, 2, 5, 0, 0)]]
)
def test_value_and_gradient_are_the_true_mean(
    pool: Pool, plan: Plan, averaged: bool, counts: Sequence[Sequence[int]]
) -> None:
    every = torch.cat(
        [losses_of(rank, step, c) for step, c in enumerate(counts) for rank in range(5)]
    )
    for mean, gradient in pool.run(mean_and_gradient, plan, counts, averaged):
        assert mean == pytest.approx(float(every.mean()), rel=1e-12)
        assert gradient == pytest.approx(float(every.mean()), rel=1e-12)


def test_no_valid_token_anywhere_gives_zero_and_no_nan(pool: Pool) -> None:
    assert pool.run(mean_and_gradient, PLAN, [(0, 0, 0, 0, 0)], True) == [(0.0, 0.0)] * 5


def checkpointed(rank: int, reentrant: bool) -> list[float]:
    """Worker: two steps whose mean is computed again in backward; return the gradients."""
    with init(PLAN, device="cpu", timeout=TIMEOUT) as context:

        def loss(w: torch.Tensor) -> torch.Tensor:
            return context.token_mean(3 * w, 5, grad_average=5)

        found = []
        for _ in range(2):
            w = torch.ones((), requires_grad=True)
            checkpoint(loss, w, use_reentrant=reentrant).backward()
            assert w.grad is not None
            found.append(float(w.grad))
        return found


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_mean_inside_a_checkpoint_breaks_nothing(pool: Pool, reentrant: bool) -> None:
    """The recomputation stops by an exception as soon as it has what backward needs."""
    for found in pool.run(checkpointed, reentrant):
        assert found == pytest.approx([0.6, 0.6])


def half_precision(rank: int) -> float:
    """Worker: the gradient of a float16 loss over more tokens than 1 / n is precise for there."""
    with init(PLAN, device="cpu", timeout=TIMEOUT) as context:
        loss_sum = torch.ones((), dtype=torch.float16, requires_grad=True)
        mean = context.token_mean(loss_sum, 2_000_000, grad_average=1)
        mean.backward(torch.tensor(2.0**15, dtype=torch.float16))
        assert loss_sum.grad is not None
        return float(loss_sum.grad)


def test_a_scaled_float16_loss_keeps_its_gradient(pool: Pool) -> None:
    for found in pool.run(half_precision):
        assert found == pytest.approx(2**15 / 1e7, rel=1e-3)


def refused(rank: int) -> list[str]:
    """Worker: return what wrong arguments say."""
    said = []
    wrong = [
        (torch.zeros(2), 1, 5),
        (torch.zeros(()), 1, 0),
        (torch.zeros(()), torch.ones(1), 5),
        (torch.zeros((), dtype=torch.int64), 1, 5),
        (torch.zeros(()), -3, 5),
    ]
    for loss, tokens, average in wrong:
        with init(PLAN, device="cpu", timeout=TIMEOUT) as context:
            try:
                context.token_mean(loss, tokens, grad_average=average)
            except ValueError as error:
                said.append(str(error))
    return said


def test_wrong_arguments_are_named(pool: Pool) -> None:
    first = pool.run(refused)[0]
    assert first == [
        "loss_sum has shape (2,); pass the sum, a scalar",
        "grad_average is 0; it must be 1 or more",
        "num_tokens has shape (1,); pass a scalar",
        "loss_sum is torch.int64; it must be a floating dtype",
        "num_tokens is -3; it must be 0 or more",
    ]
