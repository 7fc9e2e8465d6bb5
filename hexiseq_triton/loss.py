"""The mean loss over all tokens of all ranks, right in value and in gradient.

With n_r valid tokens and a loss sum l_r on rank r the loss is L = sum_r l_r / sum_r n_r; means of
means are wrong as soon as the n_r differ. A wrapper that averages gradients over W ranks divides
what we return by W, so the gradient of l_r is scaled by W / sum_r n_r.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hexiseq_triton.errors import InputError, PeerError


def mean_of_ranks(
    loss_sum: torch.Tensor,
    num_tokens: int | torch.Tensor,
    *,
    grad_average: int,
    group: dist.ProcessGroup,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean loss a token over all ranks of `group`, and its slope; a collective call.

    With gradient accumulation pass the valid tokens of the *whole* step as `num_tokens` in each
    micro-step; the returned values then add up to the step's mean.

    Args:
        loss_sum: this rank's sum of token losses, a scalar; 0 where it has no valid token.
        num_tokens: this rank's valid tokens.
        grad_average: over how many ranks the wrapper averages gradients (FSDP2, DDP: its mesh
            size); 1 if it sums them.
        group: all ranks that train together.

    Returns:
        The mean, the same on every rank, 0 if no rank has a valid token; and what a wrapper wants
        as its slope in this rank's loss sum. Both are float64 scalars without a gradient.

    Raises:
        InputError: if `loss_sum` or `num_tokens` is no scalar, `num_tokens` is below 0 or
            `grad_average` below 1.
        PeerError: if another rank stopped answering.
    """
    if loss_sum.dim() != 0:
        raise InputError(f"loss_sum has shape {tuple(loss_sum.shape)}; pass the sum, a scalar")
    if not loss_sum.is_floating_point():
        raise InputError(f"loss_sum is {loss_sum.dtype}; it must be a floating dtype")
    if isinstance(num_tokens, torch.Tensor) and num_tokens.dim() != 0:
        raise InputError(f"num_tokens has shape {tuple(num_tokens.shape)}; pass a scalar")
    if not isinstance(num_tokens, torch.Tensor) and num_tokens < 0:
        raise InputError(f"num_tokens is {num_tokens}; it must be 0 or more")
    if grad_average < 1:
        raise InputError(f"grad_average is {grad_average}; it must be 1 or more")
    # float64: a token count above 2^24 is no float32 integer
    own = torch.as_tensor(num_tokens, device=loss_sum.device)
    totals = torch.stack([loss_sum.detach().double(), own.detach().double()])
    try:
        dist.all_reduce(totals, group=group)
    except RuntimeError as error:
        raise PeerError(f"the sum of losses failed: {error}") from error
    total_loss, total_tokens = totals.unbind()
    weight = torch.where(total_tokens > 0, 1.0 / total_tokens.clamp(min=1.0), 0.0)
    return total_loss * weight, grad_average * weight


def with_gradient(loss_sum: torch.Tensor, mean: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    """Return the mean in the dtype of the loss sum, with that slope in it."""
    mean = _Mean.apply(loss_sum, mean, slope)  # type: ignore[no-untyped-call]
    return mean


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, loss_sum: torch.Tensor, mean: torch.Tensor, slope: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(slope)
        return mean.to(loss_sum.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        # rounded last: 1 / num_tokens alone may be below what float16 holds
        return (grads[0].double() * slope).to(grads[0].dtype), None, None
