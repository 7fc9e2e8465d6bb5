"""What the tuner runs: every attention kernel on one causal document of bf16 inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial

import torch

from hexiseq_triton.kernels.backward_inputs import BackwardInputs, backward_inputs
from hexiseq_triton.kernels.configs import Config
from hexiseq_triton.kernels.delta import row_dots
from hexiseq_triton.kernels.forms import form, forms
from hexiseq_triton.kernels.forward import prepare_forward
from hexiseq_triton.kernels.grad_kv import prepare_by_key_tiles
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
            launch = prepare_forward(
                *forms(used), None, self._segments, self._segments, self._heads,
                self._options, first=True, last=True, sm_margin=0, config=config,
            )  # fmt: skip
            assert launch is not None, "a problem has tokens"
            # v whole and v bounded, as `attention_forward` passes it; without a sink any tensor
            tensors = (self.q, self.k, self.v, self.v, self.out, self.lse, self.out, self.lse)
            return launch, partial(launch, *tensors)
        if table == "grad_q":
            launch = prepare_grad_q(self._inputs, config)
            assert launch is not None
            return launch, partial(launch, *self._loaded, self.dq)
        total = None if table == "grad_kv" else self._total
        launch = prepare_by_key_tiles(self._inputs, config, None if total is None else form(total))
        assert launch is not None
        if total is None:
            return launch, partial(launch, *self._loaded, self.q, self.dk, self.dv)
        return launch, partial(self._run_fused, launch, total)

    def _run_fused(self, launch: Prepared, total: torch.Tensor) -> None:
        """Run the fused backward with all that it needs around it."""
        total.zero_()
        launch(*self._loaded, total, self.dk, self.dv)
        self.dq.copy_(total)

    @cached_property
    def _total(self) -> torch.Tensor:
        """Where the fused backward adds up dq, [T, H, D] fp32."""
        return torch.empty_like(self.dq, dtype=torch.float32)

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
