"""Attention over segments: the definition, and the kernels that must match it."""

from hexiseq_triton.kernels.attention import attention_backward, attention_forward, row_dots
from hexiseq_triton.kernels.options import AttentionOptions, HeadMap, state_dtype

__all__ = [
    "AttentionOptions",
    "HeadMap",
    "attention_backward",
    "attention_forward",
    "row_dots",
    "state_dtype",
]
