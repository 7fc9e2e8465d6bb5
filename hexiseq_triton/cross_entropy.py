"""Summed cross entropy in chunks of rows, of logits or of a linear output layer.

For a row x with label c, logits z = W x and p = softmax(z):

    loss = logsumexp(z) - z_c,    dz = p - e_c,    dx = W^T dz,    dW = sum over rows of dz x^T

Of an output layer the logits never exist whole: each chunk's gradients are computed beside its
loss, while its logits exist, and backward scales them. Of given logits it is their float32 copies
that never exist whole: backward computes p again.
"""

from __future__ import annotations

from typing import Any

import torch

from hexiseq_triton.errors import InputError
from hexiseq_triton.kernels import state_dtype
from hexiseq_triton.planner.logits import chunk_tokens
from hexiseq_triton.shard import IGNORED_LABEL


def summed_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *, chunk_rows: int | None = None
) -> torch.Tensor:
    """Return the sum of the token losses in nats, a float32 scalar (float64 for float64 input).

    Args:
        x: inputs of the output layer, [T, hidden]; T may be 0.
        weight: its matrix, [vocab, hidden], in the dtype of x unless autocast sees to that.
        labels: [T] int64; rows with -100 count nothing.
        chunk_rows: rows whose logits exist at a time; as many as the planner counts on if left out.

    Raises:
        InputError: if the shapes or dtypes don't fit each other, or `chunk_rows` is below 1.
    """
    _check("x", x, labels)
    alike = weight.dtype == x.dtype or torch.is_autocast_enabled(x.device.type)
    if weight.shape[1:] != x.shape[1:] or not alike:
        raise InputError(
            f"weight has shape {tuple(weight.shape)} and is {weight.dtype}; expected "
            f"[vocab, {x.shape[1]}] in {x.dtype}"
        )
    rows = _rows_of_a_chunk(chunk_rows, weight.shape[0])
    # asked here: inside the function gradients are off, and `needs_input_grad` knows no `no_grad`
    is_training = torch.is_grad_enabled()
    loss: torch.Tensor = _SummedCrossEntropy.apply(x, weight, labels, rows, is_training)  # type: ignore[no-untyped-call]
    return loss


def summed_cross_entropy_of_logits(
    logits: torch.Tensor, labels: torch.Tensor, *, chunk_rows: int | None = None
) -> torch.Tensor:
    """Return the sum of the token losses in nats, a float32 scalar (float64 for float64 input).

    Args:
        logits: [T, vocab] in any floating dtype; T may be 0.
        labels: [T] int64; rows with -100 count nothing.
        chunk_rows: rows that exist in float32 at a time; a number by the vocabulary if left out.

    Raises:
        InputError: if the shapes or dtypes don't fit each other, or `chunk_rows` is below 1.
    """
    _check("logits", logits, labels)
    rows = _rows_of_a_chunk(chunk_rows, logits.shape[1])
    loss: torch.Tensor = _OfLogits.apply(logits, labels, rows)  # type: ignore[no-untyped-call]
    return loss


def _check(name: str, rows: torch.Tensor, labels: torch.Tensor) -> None:
    if rows.dim() != 2 or not rows.is_floating_point():
        raise InputError(
            f"{name} has shape {tuple(rows.shape)} and is {rows.dtype}; expected two dimensions of "
            "a floating dtype, tokens first"
        )
    if labels.shape != rows.shape[:1] or labels.dtype != torch.int64:
        raise InputError(
            f"labels have shape {tuple(labels.shape)} and are {labels.dtype}; expected one int64 "
            f"for each of {rows.shape[0]} tokens"
        )


def _rows_of_a_chunk(chunk_rows: int | None, vocab: int) -> int:
    if chunk_rows is None:
        return chunk_tokens(vocab)
    if chunk_rows < 1:
        raise InputError(f"chunk_rows is {chunk_rows}; it must be 1 or more, or None")
    return chunk_rows


def _refuse_second_derivative() -> None:
    """Raise if backward is to be differentiated: what it returns would count as constant."""
    if torch.is_grad_enabled():
        raise InputError(
            "the gradients of summed cross entropy cannot be differentiated again; call backward "
            "without create_graph=True, or use torch.nn.functional.cross_entropy"
        )


class _OfLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, chunk_rows: int
    ) -> torch.Tensor:
        ignored = labels == IGNORED_LABEL
        target = labels.masked_fill(ignored, 0)[:, None]
        state = state_dtype(logits.dtype)
        lse = torch.cat([x.to(state).logsumexp(-1) for x in logits.split(chunk_rows)])
        log_p_target = logits.gather(1, target)[:, 0].to(state) - lse
        ctx.save_for_backward(logits, target, ignored, lse)
        ctx.chunk_rows = chunk_rows
        return -log_p_target.masked_fill(ignored, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _refuse_second_derivative()
        logits, target, ignored, lse = ctx.saved_tensors
        dlogits = torch.empty_like(logits)
        parts = (x.split(ctx.chunk_rows) for x in (logits, dlogits, target, ignored, lse))
        for x, dx, c, is_ignored, total in zip(*parts, strict=True):
            log_p = x.to(lse.dtype) - total[:, None]
            p = log_p.exp().scatter_(1, c, torch.expm1(log_p.gather(1, c)))
            dx.copy_((p * grads[0]).masked_fill_(is_ignored[:, None], 0.0))
        return dlogits, None, None


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        chunk_rows: int,
        is_training: bool,
    ) -> torch.Tensor:
        state = state_dtype(x.dtype)
        loss = torch.zeros((), dtype=state, device=x.device)
        wants_dx, wants_dweight = (is_training and needed for needed in ctx.needs_input_grad[:2])
        dx = torch.empty_like(x) if wants_dx else None
        dweight = torch.zeros_like(weight, dtype=state) if wants_dweight else None
        for start in range(0, x.shape[0], chunk_rows):
            rows = slice(start, start + chunk_rows)
            ignored = (labels[rows] == IGNORED_LABEL)[:, None]
            # masks act on rows of x and dx, which are narrower than those of logits
            own = x[rows].masked_fill(ignored, 0.0)
            target = labels[rows, None].masked_fill(ignored, 0)
            log_p = torch.log_softmax(own @ weight.T, -1, dtype=state)
            log_p_target = log_p.gather(1, target)
            loss -= log_p_target.masked_fill(ignored, 0.0).sum()
            if dx is None and dweight is None:
                continue
            dlogits = torch.exp(log_p, out=torch.empty_like(log_p, dtype=x.dtype))
            # p - 1 before it is rounded: p may be next to 1
            dlogits.scatter_(1, target, torch.expm1(log_p_target).to(x.dtype))
            if dx is not None:
                dx[rows] = (dlogits @ weight).masked_fill(ignored, 0.0)
            if dweight is not None:
                _add_product(dweight, dlogits.T, own)
        ctx.save_for_backward(dx, None if dweight is None else dweight.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _refuse_second_derivative()
        dx, dweight = (None if x is None else _scaled(x, grads[0]) for x in ctx.saved_tensors)
        return dx, dweight, None, None, None


def _scaled(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return x times a number, which is not rounded to the dtype of x: that would scale all of x.

    As a tensor of one dimension it counts where PyTorch picks the dtype of the product.
    """
    return torch.mul(x, factor.reshape(1), out=torch.empty_like(x))


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add a b to `total`, which may have more bits than a and b."""
    if total.is_cuda and total.dtype != a.dtype:
        # one pass over the matrix, and no sum of a chunk is rounded before it is added
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b
