"""The loss in chunks of rows: of an output layer, and of logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hexiseq_triton.cross_entropy import summed_cross_entropy, summed_cross_entropy_of_logits
from hexiseq_triton.errors import InputError


def random_layer(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(7, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    labels = torch.randint(0, 7, (rows,), generator=generator)
    labels[::3] = -100
    return x, weight, labels


@pytest.mark.parametrize("chunk_rows", [1, 3, 10, 11, 100])
def test_chunks_change_neither_the_loss_nor_its_gradients(chunk_rows: int) -> None:
    x, weight, labels = random_layer(11)

    loss = summed_cross_entropy(x, weight, labels, chunk_rows=chunk_rows)
    found = torch.autograd.grad(2.0 * loss, (x, weight))

    expected = F.cross_entropy(x @ weight.T, labels, reduction="sum")
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, torch.autograd.grad(2.0 * expected, (x, weight)))


def test_ignored_rows_count_nothing_even_if_they_are_not_finite() -> None:
    x, weight, labels = random_layer(4)
    x.data[0] = torch.inf
    assert labels[0] == -100

    loss = summed_cross_entropy(x, weight, labels)
    dx, _ = torch.autograd.grad(loss, (x, weight))

    assert loss.isfinite()
    assert dx.isfinite().all()


class _LargestResult(TorchDispatchMode):
    """Remembers the most rows of any [rows, vocab] result, or of those of one dtype."""

    def __init__(self, vocab: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.vocab, self.dtype, self.rows = vocab, dtype, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if (
            isinstance(result, torch.Tensor)
            and result.shape[1:] == (self.vocab,)
            and self.dtype in (None, result.dtype)
        ):
            self.rows = max(self.rows, result.shape[0])
        return result


def test_no_more_logits_exist_than_those_of_one_chunk() -> None:
    x, weight, labels = random_layer(30)

    with _LargestResult(vocab=7) as seen:  # the transposed matrix has 5 rows
        summed_cross_entropy(x, weight, labels, chunk_rows=6).backward()

    assert seen.rows == 6


class _Products(TorchDispatchMode):
    """Counts the products of matrices."""

    num = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.num += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("learns", "has_gradients", "products"),
    [("xw", True, 3), ("x", True, 2), ("w", True, 2), ("", True, 1), ("xw", False, 1)],
)
def test_no_gradient_is_computed_that_nobody_wants(
    learns: str, has_gradients: bool, products: int
) -> None:
    """Under `no_grad` as in evaluation, and of a matrix or inputs that are frozen."""
    x, weight, labels = random_layer(4)
    expected = F.cross_entropy(x @ weight.T, labels, reduction="sum").detach()
    leaves = [leaf.requires_grad_(name in learns) for name, leaf in (("x", x), ("w", weight))]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]

    with torch.set_grad_enabled(has_gradients), _Products() as seen:
        loss = summed_cross_entropy(x, weight, labels)

    assert seen.num == products
    torch.testing.assert_close(loss.detach(), expected)
    if wanted and has_gradients:
        exact = F.cross_entropy(x @ weight.T, labels, reduction="sum")
        found, wanted_grads = (torch.autograd.grad(each, wanted) for each in (loss, exact))
        torch.testing.assert_close(found, wanted_grads)


@pytest.mark.parametrize(
    "call",
    [summed_cross_entropy, lambda x, w, y: summed_cross_entropy_of_logits(x @ w.T, y)],
    ids=["of a layer", "of logits"],
)
def test_a_second_derivative_raises(call: Callable[..., torch.Tensor]) -> None:
    """Else a penalty on the gradient would count nothing: it would be a constant."""
    x, weight, labels = random_layer(4)

    with pytest.raises(InputError, match="without create_graph=True"):
        torch.autograd.grad(call(x, weight, labels), x, create_graph=True)


def test_low_precision_inputs_give_a_float32_loss() -> None:
    x, weight, labels = random_layer(11)

    loss = summed_cross_entropy(x.bfloat16(), weight.bfloat16(), labels, chunk_rows=4)

    assert loss.dtype == torch.float32
    exact = F.cross_entropy(x @ weight.T, labels, reduction="sum")
    torch.testing.assert_close(loss.double(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_gradients_are_scaled_by_what_was_asked(dtype: torch.dtype) -> None:
    """1 / 300 rounded to bfloat16 is off by 0.2 %, and so would be the norm of the gradient."""
    x, weight, labels = random_layer(200)
    low = [leaf.detach().to(dtype).requires_grad_() for leaf in (x, weight)]

    whole = torch.autograd.grad(summed_cross_entropy(*low, labels), low)
    scaled = torch.autograd.grad(summed_cross_entropy(*low, labels) / 300, low)

    for once, part in zip(whole, scaled, strict=True):
        assert part.dtype == dtype
        assert 300 * float(part.double().norm() / once.double().norm()) == pytest.approx(
            1, abs=1e-3
        )


def test_autocast_takes_a_matrix_in_float32() -> None:
    x, weight, labels = random_layer(11)
    x, weight = (leaf.detach().float().requires_grad_() for leaf in (x, weight))

    with torch.autocast("cpu", torch.bfloat16):
        loss = summed_cross_entropy(x.bfloat16(), weight, labels)
    found = torch.autograd.grad(loss, (x, weight))

    exact = F.cross_entropy(x @ weight.T, labels, reduction="sum")
    torch.testing.assert_close(loss, exact, rtol=1e-2, atol=1e-2)
    for got, wanted in zip(found, torch.autograd.grad(exact, (x, weight)), strict=True):
        assert float((got - wanted).norm() / wanted.norm()) < 0.02  # bfloat16 has 8 bits


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_chunks_round_the_gradient_of_the_matrix_once(dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x, weight = (
        torch.randn(n, 64, device="cuda", generator=generator).to(dtype).requires_grad_()
        for n in (3001, 97)
    )
    labels = torch.randint(0, 97, (3001,), device="cuda", generator=generator)
    labels[::5] = -100

    def grads(chunk_rows: int) -> tuple[torch.Tensor, ...]:
        loss = summed_cross_entropy(x, weight, labels, chunk_rows=chunk_rows)
        return torch.autograd.grad(loss, (x, weight))

    logits = x.double() @ weight.double().T
    exact = torch.autograd.grad(F.cross_entropy(logits, labels, reduction="sum"), (x, weight))
    for whole, in_chunks, expected in zip(grads(len(x)), grads(10), exact, strict=True):
        errors = [(found - expected).double().abs().max() for found in (whole, in_chunks)]
        assert 0 < errors[1] <= 1.5 * errors[0]


# -------------------------------------------------------------------- of logits


def random_logits(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = 4 * torch.randn(rows, 7, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, 7, (rows,), generator=generator)
    labels[::3] = -100
    return logits.to(dtype).requires_grad_(), labels


@pytest.mark.parametrize("chunk_rows", [1, 3, 11, 100])
@pytest.mark.parametrize("rows", [0, 1, 11])
def test_chunks_of_logits_change_neither_the_loss_nor_its_gradient(
    rows: int, chunk_rows: int
) -> None:
    logits, labels = random_logits(rows, torch.float64)

    loss = summed_cross_entropy_of_logits(logits, labels, chunk_rows=chunk_rows)
    expected = F.cross_entropy(logits, labels, reduction="sum")

    torch.testing.assert_close(loss, expected)
    for factor in (2.0, 0.5):  # twice: nothing is scaled in place
        found, wanted = (
            torch.autograd.grad(factor * each, logits, retain_graph=True)[0]
            for each in (loss, expected)
        )
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_of_low_precision_are_rounded_once(dtype: torch.dtype) -> None:
    logits, labels = random_logits(300, dtype)
    exact = logits.detach().double().requires_grad_()

    loss = summed_cross_entropy_of_logits(logits, labels) / 300
    expected = F.cross_entropy(exact, labels, reduction="sum") / 300

    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    (found,), (wanted,) = (
        torch.autograd.grad(each, leaf) for each, leaf in ((loss, logits), (expected, exact))
    )
    assert found.dtype == dtype
    torch.testing.assert_close(found, wanted.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-7)


def test_ignored_logits_count_nothing_even_if_they_are_not_finite() -> None:
    logits, labels = random_logits(4, torch.float32)
    logits.data[0] = torch.nan
    assert labels[0] == -100

    loss = summed_cross_entropy_of_logits(logits, labels)
    (dlogits,) = torch.autograd.grad(loss, logits)

    assert loss.isfinite()
    assert dlogits.isfinite().all()


def test_no_more_logits_exist_in_float32_than_those_of_one_chunk() -> None:
    logits, labels = random_logits(30, torch.bfloat16)

    with _LargestResult(vocab=7, dtype=torch.float32) as seen:
        summed_cross_entropy_of_logits(logits, labels, chunk_rows=6).backward()

    assert seen.rows == 6


# -------------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w, y: summed_cross_entropy(x[None], w, y), r"x has shape \(1, 4, 5\)"),
        (lambda x, w, y: summed_cross_entropy(x, w.T, y), r"weight has shape \(5, 7\)"),
        (lambda x, w, y: summed_cross_entropy(x, w.float(), y), r"weight .* is torch\.float32"),
        (lambda x, w, y: summed_cross_entropy(x, w, y[1:]), r"labels have shape \(3,\)"),
        (lambda x, w, y: summed_cross_entropy_of_logits(x @ w.T, y.int()), r"are torch\.int32"),
        (lambda x, w, y: summed_cross_entropy_of_logits(x.int(), y), r"is torch\.int32"),
        (lambda x, w, y: summed_cross_entropy(x, w, y, chunk_rows=-1), r"chunk_rows is -1"),
        (lambda x, w, y: summed_cross_entropy_of_logits(x, y, chunk_rows=0), r"chunk_rows is 0"),
    ],
)
def test_what_does_not_fit_is_named(call: Callable[..., torch.Tensor], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(*random_layer(4))
