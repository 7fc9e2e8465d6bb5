"""What this rank computes in a second, with the package's own layer and attention.

Token-wise work is a decoder layer without its attention: norms, projections, rotary embedding and
MLP. Its rate counts the FLOPs of the matrices alone, as the planner does, so the rest is in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from hexiseq_triton.kernels import (
    AttentionOptions,
    HeadMap,
    attention_backward,
    attention_forward,
    row_dots,
    state_dtype,
)
from hexiseq_triton.llama import INIT_STD, Block, LlamaConfig
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.problem import Work
from hexiseq_triton.profiling.clock import median_seconds
from hexiseq_triton.rope import rope_tables
from hexiseq_triton.segments import CAUSAL, whole_documents

_WIDTH = 128
"""Widths of MLPs are multiples of it."""
WorkName = Literal["gemm_forward", "gemm_backward", "attention_forward", "attention_backward"]


@dataclass(frozen=True)
class Rate:
    """FLOP/s in one kind of work, for `tokens` rows or a document of so many."""

    work: WorkName
    tokens: int
    flops_per_s: float
    head_dim: int | None = None

    @property
    def key(self) -> tuple[str, int, int | None]:
        return self.work, self.tokens, self.head_dim


def token_wise_rates(
    spec: ModelSpec, row_counts: Sequence[int], device: torch.device, budget_seconds: float
) -> Iterator[Rate]:
    """Yield forward's and backward's rate of a layer of this shape, for each number of rows."""
    block, config = _layer(spec, device)
    parameters = list(block.parameters())
    for rows in row_counts:
        x = torch.randn(rows, config.hidden, dtype=_dtype(device), device=device)
        x.requires_grad_()
        positions = torch.arange(rows, device=device)
        rope = rope_tables(positions, config.head_dim, config.rope_theta)

        def forward(x: torch.Tensor = x, rope: Any = rope) -> torch.Tensor:
            out: torch.Tensor = block(x, rope, _skip)
            return out

        out = forward()
        gradient = torch.randn_like(out)

        def backward(x: torch.Tensor = x, out: Any = out, gradient: Any = gradient) -> object:
            return torch.autograd.grad(out, [x, *parameters], gradient, retain_graph=True)

        flops = 2.0 * config.layer_matrix_parameters * rows
        yield Rate("gemm_forward", rows, flops / median_seconds(forward, device, budget_seconds))
        seconds = median_seconds(backward, device, budget_seconds)
        yield Rate("gemm_backward", rows, Work.BACKWARD_LINEAR * flops / seconds)


class AttentionCalls:
    """Forward and backward of one causal document on this rank, alone."""

    def __init__(
        self, head_dim: int, length: int, heads: int, kv_heads: int, device: torch.device
    ) -> None:
        dtype = _dtype(device)
        self._q, self._k, self._v, self._do = (
            torch.randn(length, count, head_dim, dtype=dtype, device=device)
            for count in (heads, kv_heads, kv_heads, heads)
        )
        state = state_dtype(dtype)
        self._out = torch.empty_like(self._q)
        self._lse = torch.empty(heads, length, dtype=state, device=device)
        self._dq, self._dk, self._dv = (
            torch.empty_like(x, dtype=state) for x in (self._q, self._k, self._v)
        )
        segments = tuple(whole_documents((length,)))
        options = AttentionOptions(CAUSAL, head_dim**-0.5)
        self._call = (segments, segments, HeadMap(0, heads // kv_heads), options)
        self.shape = tuple(self._q.shape)
        self.device = device
        self.forward_flops = 4.0 * head_dim * heads * length * (length + 1) / 2

    def forward(self, sm_margin: int = 0) -> None:
        attention_forward(
            self._q, self._k, self._v, None, self._lse, *self._call,
            first=True, out=self._out, sm_margin=sm_margin,
        )  # fmt: skip

    def backward(self, sm_margin: int = 0) -> None:
        delta = row_dots(self._do, self._out)
        attention_backward(
            self._q, self._k, self._v, self._do, self._lse, delta,
            self._dq, self._dk, self._dv, *self._call,
            accumulate=False, sm_margin=sm_margin,
        )  # fmt: skip


def attention_rates(calls: AttentionCalls, budget_seconds: float) -> Iterator[Rate]:
    """Yield forward's and backward's rate over one causal document."""
    length, _, head_dim = calls.shape
    flops = calls.forward_flops
    seconds = median_seconds(calls.forward, calls.device, budget_seconds)
    yield Rate("attention_forward", length, flops / seconds, head_dim)
    seconds = median_seconds(calls.backward, calls.device, budget_seconds)
    yield Rate("attention_backward", length, Work.BACKWARD_ATTENTION * flops / seconds, head_dim)


def copy_bytes_per_s(num_bytes: int, device: torch.device, budget_seconds: float) -> float:
    """Return bytes read plus bytes written in a second, by a copy on the device."""
    source = torch.randn(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    seconds = median_seconds(lambda: target.copy_(source), device, budget_seconds)
    return 2 * source.nbytes / seconds


def measured_shape(spec: ModelSpec) -> LlamaConfig:
    """Return the shape that stands for a model's: a plain MLP becomes a gated one.

    That has about as many parameters, in a width that suits tensor cores: they are half as fast on
    an odd one.
    """
    if not spec.gated:
        spec = replace(spec, gated=True, ffn=_WIDTH * -(-2 * spec.ffn // (3 * _WIDTH)))
    return LlamaConfig.from_spec(spec)


def _layer(spec: ModelSpec, device: torch.device) -> tuple[Block, LlamaConfig]:
    config = measured_shape(spec)
    block = Block(config, recompute=False).to(device, _dtype(device))
    with torch.no_grad():
        for parameter in block.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, INIT_STD)
    return block, config


def _skip(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Be the attention of a layer that has none."""
    out: torch.Tensor = _Skip.apply(q, k, v)  # type: ignore[no-untyped-call]
    return out


class _Skip(torch.autograd.Function):
    """Passes q on; k and v get gradients of the right shape, so that their products are made."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.kv_heads = k.shape[1]
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        like_keys = grads[0][:, : ctx.kv_heads]
        return grads[0], like_keys, like_keys


def _dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of training: bf16 on a GPU, float32 on a CPU, which is slow in bf16."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32
