"""Attention under a plan as an nn.Module."""

from __future__ import annotations

import torch
from torch import nn

from hexiseq_triton.attention import hexiseq_attention
from hexiseq_triton.context import ParallelContext
from hexiseq_triton.flash import Window
from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.rope import RopeLike


class HexiSeqAttention(nn.Module):
    """Exact attention of a packed batch over uneven tokens and heads.

    Arguments have flash-attention 2's names and defaults; see `hexiseq_attention`. The only
    parameter is `sink`, [H] in torch's default dtype, which begins at 0; None unless
    `learnable_sink`.
    """

    def __init__(
        self,
        context: ParallelContext,
        *,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = (-1, -1),
        softcap: float = 0.0,
        learnable_sink: bool = False,
        deterministic: bool = False,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.context = context
        self.softmax_scale = softmax_scale
        self.causal = causal
        self.window_size = window_size
        self.softcap = softcap
        self.deterministic = deterministic
        self.reduce_dtype = reduce_dtype
        self.sink: nn.Parameter | None = None
        if learnable_sink:
            # a model that is built on "meta" gets memory, and then numbers, once it is sharded
            default = torch.get_default_device()
            device = default if default.type == "meta" else context.device
            self.sink = nn.Parameter(torch.empty(context.plan.num_heads, device=device))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Give the sink its first numbers, 0; for who makes a model on "meta" and fills it."""
        if self.sink is not None:
            nn.init.zeros_(self.sink)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: BatchLayout,
        rope: RopeLike | None = None,
    ) -> torch.Tensor:
        """Return the output of q, k, v: this rank's rows, [T, H, D] or [B, S, H, D]."""
        return hexiseq_attention(
            q,
            k,
            v,
            self.context,
            layout,
            softmax_scale=self.softmax_scale,
            causal=self.causal,
            window_size=self.window_size,
            softcap=self.softcap,
            rope=rope,
            learnable_sink=self.sink,
            deterministic=self.deterministic,
            reduce_dtype=self.reduce_dtype,
        )

    def extra_repr(self) -> str:
        return (
            f"causal={self.causal}, window_size={self.window_size}, softcap={self.softcap}, "
            f"learnable_sink={self.sink is not None}"
        )
