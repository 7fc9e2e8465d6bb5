"""What a backward call is made of: checked once for the same forms, then kept."""

from __future__ import annotations

from functools import lru_cache

import torch

from hexiseq_triton.kernels.configs import Config
from hexiseq_triton.kernels.forms import Blocks, Form, bounded_blocks
from hexiseq_triton.kernels.interned import Interned
from hexiseq_triton.kernels.kept import MOST_KEPT
from hexiseq_triton.kernels.launch import Launch
from hexiseq_triton.kernels.options import AttentionOptions, HeadMap

Tensors = tuple[torch.Tensor, ...]
"""What every backward kernel loads: q, k, v, do, lse, delta."""


class BackwardInputs:
    """The forms of all tensors of one chunk of keys, with its segments, heads and options.

    Raises:
        ValueError: if a dtype, head dimension, shape or stride is not supported.
    """

    def __init__(
        self,
        q: Form,
        k: Form,
        v: Form,
        do: Form,
        lse: Form,
        delta: Form,
        dq: Form,
        dk: Form,
        dv: Form,
        q_segments: Interned,
        kv_segments: Interned,
        heads: HeadMap,
        options: AttentionOptions,
        accumulate: bool,
        sm_margin: int,
    ) -> None:
        self.launch = Launch(q, k, v, heads, options)
        self.launch.expect("do", do, tuple(q.shape), q.dtype)
        self.launch.expect("lse", lse, (q.shape[1], q.shape[0]), torch.float32)
        self.launch.expect("delta", delta, (q.shape[1], q.shape[0]), torch.float32)
        if q.shape[1] > 1 and delta.strides[0] != lse.strides[0]:
            raise ValueError(
                f"delta has stride {delta.strides[0]} and lse {lse.strides[0]}; make them equal"
            )
        if lse.strides[0] * lse.shape[0] >= 1 << 31:
            raise ValueError(
                f"lse has {lse.shape[0]} rows of stride {lse.strides[0]}: 2**31 or more"
            )
        state = torch.float32 if accumulate else None
        self.launch.expect("dq", dq, tuple(q.shape), state)
        self.launch.expect("dk", dk, tuple(k.shape), state)
        self.launch.expect("dv", dv, tuple(k.shape), state)
        self.q, self.k, self.dq, self.dk, self.dv = q, k, dq, dk, dv
        self.segments = (q_segments.segments, kv_segments.segments)
        self.accumulate = accumulate
        self.sm_margin = sm_margin
        self._loaded = (q, k, v, do)
        self._lse = lse
        self._fit_descriptors = self.launch.fits_descriptors(q, k, v, do)

    def uses_descriptors(self, config: Config) -> bool:
        """Return whether the kernel loads blocks with the copy engine."""
        return config.descriptors and self._fit_descriptors

    def blocks(self, config: Config) -> list[Blocks | None]:
        """Return how descriptors cut q, k, v and do; lse and delta are plain pointers."""
        if not self.uses_descriptors(config):
            return [None] * 6
        m, n = config.block_m, config.block_n
        cut = zip(self._loaded, (m, n, n, m), strict=True)
        return [*(x.blocks(rows) for x, rows in cut), None, None]

    def bounded_blocks(self, config: Config) -> list[Blocks | None]:
        """Return the same for descriptors that stop at any row."""
        if not self.uses_descriptors(config):
            return [None] * 6
        m, n = config.block_m, config.block_n
        cut = zip(self._loaded, (m, n, n, m), strict=True)
        return [*(bounded_blocks(x, rows) for x, rows in cut), None, None]

    @property
    def strides(self) -> list[int]:
        """Token and head stride of q, k, v and do, then the row stride of lse and delta."""
        return [s for x in self._loaded for s in x.row_strides] + [self._lse.strides[0]]


backward_inputs = lru_cache(maxsize=MOST_KEPT)(BackwardInputs)
"""`BackwardInputs`, the same object for the same arguments: it is a key of prepared launches."""
