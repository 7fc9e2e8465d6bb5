"""The same causal attention by different implementations, each as a forward and a backward call.

An implementation takes a `Problem` and returns `Calls`; it raises `Unsupported` where it cannot do
the problem. Backward is everything between the output's gradient and dq, dk, dv in the input
dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from hexiseq_triton.kernels import AttentionOptions, HeadMap
from hexiseq_triton.kernels.hopper import guard
from hexiseq_triton.segments import CAUSAL, whole_documents

DEVICE = "cuda"
Call = Callable[[], object]


class Unsupported(Exception):
    """This implementation cannot do this problem here."""


@dataclass(frozen=True)
class Problem:
    """Packed documents, causal within each, bf16."""

    lengths: tuple[int, ...]
    head_dim: int
    q_heads: int = 32
    kv_heads: int = 8

    @cached_property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v and do, [T, H, D]."""
        generator = torch.Generator(DEVICE).manual_seed(0)
        heads = (self.q_heads, self.kv_heads, self.kv_heads, self.q_heads)
        options = {"device": DEVICE, "dtype": torch.bfloat16, "generator": generator}
        q, k, v, do = (torch.randn(sum(self.lengths), h, self.head_dim, **options) for h in heads)
        return q, k, v, do

    @property
    def forward_flops(self) -> float:
        return sum(4 * self.q_heads * self.head_dim * n * n / 2 for n in self.lengths)

    @property
    def backward_flops(self) -> float:
        return 2.5 * self.forward_flops

    @property
    def packed(self) -> bool:
        return len(self.lengths) > 1


@dataclass(frozen=True)
class Calls:
    """What to time."""

    forward: Call
    backward: Call


def hexiseq(problem: Problem, sm_margin: int = 0) -> Calls:
    """Return this package's general kernels, tile map and all."""
    from hexiseq_triton.kernels.backward import attention_backward
    from hexiseq_triton.kernels.delta import row_dots
    from hexiseq_triton.kernels.forward import attention_forward

    q, k, v, do = problem.inputs
    segments = tuple(whole_documents(problem.lengths))
    scale = problem.head_dim**-0.5
    call = (
        segments,
        segments,
        HeadMap(0, problem.q_heads // problem.kv_heads),
        AttentionOptions(CAUSAL, scale),
    )
    out, dq, dk, dv = (torch.empty_like(x) for x in (q, q, k, v))
    lse = torch.empty(q.shape[1], q.shape[0], device=DEVICE)

    def forward() -> None:
        attention_forward(q, k, v, None, lse, *call, first=True, out=out, sm_margin=sm_margin)

    def backward() -> None:
        delta = row_dots(do, out)
        attention_backward(
            q, k, v, do, lse, delta, dq, dk, dv, *call, accumulate=False, sm_margin=sm_margin
        )

    forward()
    return Calls(forward, backward)


def hexiseq_portable(problem: Problem) -> Calls:
    """Return the kernels for all cards, also where the Hopper kernels would run."""
    calls = hexiseq(problem)
    portable(calls.forward)()
    return Calls(portable(calls.forward), portable(calls.backward))


def portable(call: Call) -> Call:
    """Return the call with the kernels for all cards."""

    def run() -> None:
        with patch.object(guard, "runs", lambda *_: False):
            call()

    return run


def cudnn(problem: Problem) -> Calls:
    """Return cuDNN through SDPA."""
    return _sdpa(problem, SDPBackend.CUDNN_ATTENTION)


def fa2(problem: Problem) -> Calls:
    """Return FlashAttention-2 as PyTorch ships it: SDPA, or its packed form for documents."""
    if not problem.packed:
        return _sdpa(problem, SDPBackend.FLASH_ATTENTION)
    leaves, do = _leaves(problem, packed=True)
    ends = torch.tensor((0, *problem.lengths), device=DEVICE).cumsum(0).to(torch.int32)
    longest = max(problem.lengths)

    def forward() -> torch.Tensor:
        return torch.ops.aten._flash_attention_forward(
            *leaves, ends, ends, longest, longest, 0.0, True, False
        )[0]

    return _with_autograd(forward, leaves, do)


def flex(problem: Problem) -> Calls:
    """Return FlexAttention with a block mask built beforehand."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    leaves, do = _leaves(problem)
    total = sum(problem.lengths)
    document = torch.repeat_interleave(torch.tensor(problem.lengths)).to(DEVICE)

    def mask(b, h, i, j):  # type: ignore[no-untyped-def]
        return (i >= j) & (document[i] == document[j])

    def causal(b, h, i, j):  # type: ignore[no-untyped-def]
        return i >= j

    chosen = mask if problem.packed else causal
    blocks = create_block_mask(chosen, None, None, total, total, device=DEVICE)
    compiled = torch.compile(flex_attention)

    def forward() -> torch.Tensor:
        return compiled(*leaves, block_mask=blocks, enable_gqa=True)

    return _with_autograd(forward, leaves, do, fresh=True)


def fa4(problem: Problem) -> Calls:
    """Return FlashAttention-4 where it is installed."""
    try:
        from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
    except ImportError as error:
        raise Unsupported("FlashAttention-4 is not installed") from error
    leaves, do = _leaves(problem, packed=True)
    ends = torch.tensor((0, *problem.lengths), device=DEVICE).cumsum(0).to(torch.int32)

    def forward() -> torch.Tensor:
        if problem.packed:
            found = flash_attn_varlen_func(
                *leaves, cu_seqlens_q=ends, cu_seqlens_k=ends, causal=True
            )
        else:
            found = flash_attn_func(*(x[None] for x in leaves), causal=True)
        o = found[0] if isinstance(found, tuple) else found
        return o if problem.packed else o[0]

    return _with_autograd(forward, leaves, do)


def _sdpa(problem: Problem, backend: SDPBackend) -> Calls:
    if problem.packed:
        raise Unsupported("SDPA takes no packed documents")
    leaves, do = _leaves(problem)

    def forward() -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)

    return _with_autograd(forward, leaves, do)


def _leaves(
    problem: Problem, packed: bool = False
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Return q, k, v that require gradients, and do: [T, H, D] if packed, else [1, H, T, D]."""
    shaped = [x.clone() if packed else x.transpose(0, 1).contiguous()[None] for x in problem.inputs]
    return tuple(x.requires_grad_() for x in shaped[:3]), shaped[3]


def _with_autograd(
    forward: Callable[[], torch.Tensor],
    leaves: tuple[torch.Tensor, ...],
    do: torch.Tensor,
    fresh: bool = False,
) -> Calls:
    """Let autograd run backward; `fresh`: of a new forward each time, which `retain_graph` breaks.

    The forward of a fresh graph runs in the timed call; the caller subtracts its time.
    """
    if fresh:
        return Calls(forward, lambda: torch.autograd.grad(forward(), leaves, do))
    o = forward()
    return Calls(forward, lambda: torch.autograd.grad(o, leaves, do, retain_graph=True))


IMPLS: dict[str, Callable[[Problem], Calls]] = {
    "hexiseq": hexiseq,
    "hexiseq-portable": hexiseq_portable,
    "cudnn": cudnn,
    "fa2": fa2,
    "flex": flex,
    "fa4": fa4,
}
BACKWARD_RUNS_FORWARD = {"flex"}
