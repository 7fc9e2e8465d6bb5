"""Attention over segments: the definition, and the kernels that must match it."""

from hexiseq_triton.kernels.options import AttentionOptions, HeadMap, state_dtype
from hexiseq_triton.kernels.reference import attention_backward, attention_forward

__all__ = [
    "AttentionOptions",
    "HeadMap",
    "attention_backward",
    "attention_forward",
    "state_dtype",
]
