"""What the tuner runs: every attention kernel on one causal document of bf16 inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial

import torch

from hexiseq_triton.kernels.backward_inputs import BackwardInputs, backward_inputs
from hexiseq_triton.kernels.configs import Config
from hexiseq_triton.kernels.delta import row_dots
from hexiseq_triton.kernels.forms import forms
from hexiseq_triton.kernels.forward import forward_tensors, prepare_forward
from hexiseq_triton.kernels.forward_call import ForwardCall
from hexiseq_triton.kernels.grad_kv import prepare_grad_kv
from hexiseq_triton.kernels.grad_q import prepare_grad_q
from hexiseq_triton.kernels.interned import interned
from hexiseq_triton.kernels.options import AttentionOptions, HeadMap
from hexiseq_triton.kernels.prepared import Prepared
from hexiseq_triton.kernels.user_tables import TableName
from hexiseq_triton.segments import CAUSAL, whole_documents

SMALL = Config(32, 32, 4, 1)
"""Fits every card."""


class Problem:
    """One causal document, for every kernel.

    Args:
        head_dim: D.
        num_tokens: T.
        device: where.
        num_heads, num_kv_heads: heads of q, and of k and v.
    """

    def __init__(
        self,
        head_dim: int,
        num_tokens: int,
        device: torch.device,
        num_heads: int = 32,
        num_kv_heads: int = 8,
    ) -> None:
        def random(heads: int) -> torch.Tensor:
            return torch.randn(num_tokens, heads, head_dim, device=device).bfloat16()

        self.q, self.k, self.v = random(num_heads), random(num_kv_heads), random(num_kv_heads)
        self.do, self.out = random(num_heads), torch.empty_like(self.q)
        self.lse = torch.empty(num_heads, num_tokens, device=device)
        self.dq, self.dk, self.dv = (torch.empty_like(x) for x in (self.q, self.k, self.v))
        self._segments = interned(tuple(whole_documents([num_tokens])))
        self._heads = HeadMap(0, num_heads // num_kv_heads)
        self._options = AttentionOptions(CAUSAL, head_dim**-0.5)

    def prepare(self, table: TableName, config: Config) -> tuple[Prepared, Callable[[], None]]:
        """Return the launch of a kernel under `config`, and what runs it on the tensors."""
        if table == "forward":
            used = (self.q, self.k, self.v, self.out, self.lse, self.out)
            q, k, v, out, lse, _ = forms(used)
            call = ForwardCall(
                q, k, v, out, lse, out, None, self._segments, self._segments, self._heads,
                self._options, first=True, last=True, sm_margin=0,
            )  # fmt: skip
            launch = prepare_forward(call, config)
            assert launch is not None, "a problem has tokens"
            return launch, partial(launch, *forward_tensors(*used))
        written: tuple[torch.Tensor, ...]
        if table == "grad_kv":
            launch, written = prepare_grad_kv(self._inputs, config), (self.dk, self.dv)
        else:
            launch, written = prepare_grad_q(self._inputs, config), (self.dq,)
        assert launch is not None
        return launch, partial(launch, *self._loaded, *written)

    @cached_property
    def _loaded(self) -> tuple[torch.Tensor, ...]:
        """q, k, v, do, lse and delta of a finished forward."""
        _, run = self.prepare("forward", SMALL)
        run()
        return self.q, self.k, self.v, self.do, self.lse, row_dots(self.do, self.out)

    @property
    def _inputs(self) -> BackwardInputs:
        keys = forms((*self._loaded, self.dq, self.dk, self.dv))
        call = (self._segments, self._segments, self._heads, self._options)
        return backward_inputs(*keys, *call, False, 0)
