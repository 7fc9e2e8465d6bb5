"""The learnable attention sink: one more logit of each query head, in nats, without a value.

It takes its part of every row's softmax and gives nothing to the output. With lse over the keys
alone, L over keys and sink, and b the sink's logit:

    L  = log(exp(lse) + exp(b)),    o = exp(lse - L) o_keys,    p_j = exp(s_j - L)
    db = -sum over rows of exp(b - L) delta,    delta = rowsum(do * o)

So backward runs as without a sink, on L in the place of lse. A row that sees no key keeps o = 0 and
L = -inf: it gives no gradient.

Layout: o [T, H, D], lse and delta [H, T], sink [H]; all in the state dtype.
Source: Agarwal et al., gpt-oss model card, arXiv:2508.10925, section 2.
"""

from __future__ import annotations

import torch


def lse_with_sink(lse: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """Return L, [H, T], of lse and sink; -inf where lse is."""
    return torch.logaddexp(lse, sink[:, None]).masked_fill(lse == -torch.inf, -torch.inf)


def join_sink(o: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """Return the output [T, H, D] of the keys' part o; rows without keys stay 0."""
    unseen = lse == -torch.inf
    share = torch.exp(lse - lse_with_sink(lse, sink)).masked_fill(unseen, 0.0)
    return o * share.T[..., None]


def sink_gradient(
    sink: torch.Tensor, lse_with_sink: torch.Tensor, delta: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the sink, [H], from L and delta of its rows; no row gives 0."""
    unseen = lse_with_sink == -torch.inf
    share = torch.exp(sink[:, None] - lse_with_sink).masked_fill(unseen, 0.0)
    return -(share * delta).sum(-1)
