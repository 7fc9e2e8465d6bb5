"""Run the Triton kernels on packed documents, next to float64 and to plain torch.

On a machine without CUDA the kernels run in Triton's interpreter, which must be chosen before
Triton is imported: import this module first.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

ON_CARD = torch.cuda.is_available()
if not ON_CARD:
    os.environ["TRITON_INTERPRET"] = "1"

from assertions import assert_as_close_as  # noqa: E402
from dense import dense_attention  # noqa: E402

from hexiseq_triton.kernels import AttentionOptions, HeadMap  # noqa: E402
from hexiseq_triton.kernels.backward import attention_backward  # noqa: E402
from hexiseq_triton.kernels.delta import row_dots  # noqa: E402
from hexiseq_triton.kernels.forward import attention_forward  # noqa: E402
from hexiseq_triton.kernels.sink import lse_with_sink, sink_gradient  # noqa: E402
from hexiseq_triton.segments import Mask, Segment, cut, whole_documents  # noqa: E402

DEVICE = "cuda" if ON_CARD else "cpu"
BF16_INTERPRETED = 2.0
"""Twice the usual ratios (4x the plain error): the interpreter truncates to bf16."""

ALIKE = {"rtol": 2e-3, "atol": 5e-4} if ON_CARD else {}
"""How close two runs come whose tiles differ: on the card these may be of different kernels, which
round the half precision probabilities at different places."""

MARKS = [
    # the interpreter turns one-element arrays into scalars, and takes exp and log of empty rows
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    *([pytest.mark.gpu] if ON_CARD else []),
]
"""Of a module that runs the kernels: its `pytestmark`."""


@dataclass(frozen=True)
class Case:
    """Documents, heads and options of one attention."""

    lengths: tuple[int, ...]
    head_dim: int = 64
    kv_heads: int = 1
    q_per_kv: int = 2
    dtype: torch.dtype = torch.float16
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    scale: float | None = None
    sink: bool = False

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(whole_documents(self.lengths))

    @property
    def call(self) -> tuple[HeadMap, AttentionOptions]:
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        mask = Mask.from_flash(self.causal, self.window)
        return HeadMap(0, self.q_per_kv), AttentionOptions(mask, scale, self.softcap)

    def inputs(self) -> list[torch.Tensor]:
        """Return q, k, v and do; each is a view between rows of NaN, which nobody may read."""
        torch.manual_seed(0)
        heads = [self.q_per_kv * self.kv_heads, self.kv_heads, self.kv_heads]
        return [self._guarded(h) for h in [*heads, heads[0]]]

    def _guarded(self, heads: int) -> torch.Tensor:
        shape = (self.tokens + 128, heads, self.head_dim)
        buffer = torch.full(shape, torch.nan, dtype=self.dtype, device=DEVICE)
        view = buffer[64 : 64 + self.tokens]
        return view.copy_(torch.randn(view.shape))

    @property
    def sinks(self) -> torch.Tensor | None:
        """One logit of each query head, from far below to far above the scores."""
        if not self.sink:
            return None
        return torch.linspace(-4.0, 6.0, self.q_per_kv * self.kv_heads, device=DEVICE)

    def dense(self, inputs: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        """Return o, dq, dk, dv, and dsink if there is one, of dense attention in `dtype`."""
        sinks = [] if self.sinks is None else [self.sinks]
        leaves = [x.to(dtype).detach().requires_grad_() for x in (*inputs[:3], *sinks)]
        o = dense_attention(
            *leaves[:3], self.lengths, causal=self.causal, window_size=self.window,
            softcap=self.softcap, softmax_scale=self.scale, sink=leaves[3] if sinks else None,
        )  # fmt: skip
        return [o.detach(), *torch.autograd.grad(o, leaves, inputs[3].to(dtype))]


def chunks_of(
    case: Case, num_chunks: int, seed: int = 1
) -> Iterator[tuple[slice, tuple[Segment, ...]]]:
    """Yield the rows and segments of `num_chunks` chunks of keys, in a shuffled order."""
    edges = [case.tokens * i // num_chunks for i in range(num_chunks + 1)]
    runs = cut(case.segments, [b - a for a, b in pairwise(edges)])
    chunks = [(slice(*rows), tuple(run)) for rows, run in zip(pairwise(edges), runs, strict=True)]
    random.Random(seed).shuffle(chunks)
    yield from chunks


def in_chunks(
    case: Case, inputs: Sequence[torch.Tensor], num_chunks: int, *, deterministic: bool = False
) -> list[torch.Tensor]:
    """Return o, dq, dk, dv and lse with state carried through shuffled chunks of keys.

    With a sink, o comes from one more launch, that sees nothing; dsink stands before lse.
    """
    q, k, v, do = inputs
    o = torch.zeros(q.shape, device=DEVICE)
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, device=DEVICE)
    for rows, segments in chunks_of(case, num_chunks):
        attention_forward(q, k[rows], v[rows], o, lse, case.segments, segments, *case.call)
    if case.sinks is not None:
        out = torch.full_like(o, torch.nan)
        attention_forward(
            q, k[:0], v[:0], o, lse, case.segments, (), *case.call, out=out, sink=case.sinks
        )
        o, lse = out, lse_with_sink(lse, case.sinks)
    dq, dk, dv = (torch.zeros(x.shape, device=DEVICE) for x in (q, k, v))
    delta = row_dots(do, o)
    for rows, segments in chunks_of(case, num_chunks, seed=2):
        attention_backward(
            q, k[rows], v[rows], do, lse, delta, dq, dk[rows], dv[rows],
            case.segments, segments, *case.call, deterministic=deterministic,
        )  # fmt: skip
    dsink = [] if case.sinks is None else [sink_gradient(case.sinks, lse, delta)]
    return [o, dq, dk, dv, *dsink, lse]


def at_once(case: Case, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return o, dq, dk, dv and lse of single launches that write into NaN, in the input dtype."""
    q, k, v, do = inputs
    out, dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, q, k, v))
    lse = torch.full((q.shape[1], q.shape[0]), torch.nan, device=DEVICE)
    call = (case.segments, case.segments, *case.call)
    attention_forward(q, k, v, None, lse, *call, first=True, out=out, sink=case.sinks)
    delta = row_dots(do, out)
    dsink = []
    if case.sinks is not None:
        lse = lse_with_sink(lse, case.sinks)
        dsink = [sink_gradient(case.sinks, lse, delta)]
    attention_backward(q, k, v, do, lse, delta, dq, dk, dv, *call, accumulate=False)
    return [out, dq, dk, dv, *dsink, lse]


def assert_matches_dense(case: Case, num_chunks: int | None = None) -> None:
    """Compare o and all gradients with dense attention; None chunks is `at_once`."""
    inputs = case.inputs()
    found = at_once(case, inputs) if num_chunks is None else in_chunks(case, inputs, num_chunks)
    exact = case.dense(inputs, torch.float64)
    lowp = case.dense(inputs, case.dtype)
    leniency = BF16_INTERPRETED if case.dtype == torch.bfloat16 and not ON_CARD else 1.0
    for a, b, c in zip(found, exact, lowp, strict=False):
        assert_as_close_as(a, b, c, leniency=leniency)


def errors(case: Case, num_chunks: int) -> list[float]:
    """Return the RMS errors of o, dq, dk and dv against float64."""
    inputs = case.inputs()
    found, exact = in_chunks(case, inputs, num_chunks), case.dense(inputs, torch.float64)
    return [
        float((a.double() - b).square().mean().sqrt()) for a, b in zip(found, exact, strict=False)
    ]
