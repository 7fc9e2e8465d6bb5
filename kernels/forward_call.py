"""A forward call without its tensors: the key under which its launches are kept."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hexiseq_triton.kernels.forms import Form
from hexiseq_triton.kernels.interned import Interned
from hexiseq_triton.kernels.launch import Launch
from hexiseq_triton.kernels.options import AttentionOptions, HeadMap


class ForwardCall(NamedTuple):
    """What `attention_forward` was called with.

    Args:
        q, k, v, lse: forms of the tensors.
        read: of the state; nothing is read from it if `first`.
        written: of the output if `last`, else of the state.
        sink: None where there is none.
        q_segments, kv_segments, heads, options, first, sm_margin: as there.
        last: an output is written.
    """

    q: Form
    k: Form
    v: Form
    read: Form
    lse: Form
    written: Form
    sink: Form | None
    q_segments: Interned
    kv_segments: Interned
    heads: HeadMap
    options: AttentionOptions
    first: bool
    last: bool
    sm_margin: int

    def launch(self) -> Launch:
        """Return the common part of the call's launches.

        Raises:
            ValueError: if a dtype, head dimension, shape or stride is not supported; names it.
        """
        q = self.q
        launch = Launch(q, self.k, self.v, self.heads, self.options)
        launch.expect("lse", self.lse, (q.shape[1], q.shape[0]), torch.float32)
        if self.last:
            launch.expect("out", self.written, tuple(q.shape))
        if not (self.first and self.last):
            launch.expect("o", self.read, tuple(q.shape), torch.float32)
        if self.sink is not None:
            launch.expect("sink", self.sink, (q.shape[1],), torch.float32)
        return launch
