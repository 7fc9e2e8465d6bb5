"""From forms of tensors to kernel arguments: checks, and what all attention launches share."""

from __future__ import annotations

from functools import cache

import torch
import triton

from hexiseq_triton.kernels.forms import ALIGNMENT, Form
from hexiseq_triton.kernels.options import (
    MAX_SOFTCAP,
    AttentionOptions,
    HeadMap,
    kernels_refuse,
)

_LOG2E = 1.4426950408889634
_FAR = 1 << 29  # a window side beyond every position: positions stay below 2**29
_INT32 = 1 << 31
_WIDEST_BLOCK = 256  # rows of a block whose int32 offsets must not overflow
_L2_SHARE = 1.7  # of the L2 cache; programs walk the rows roughly in step, so half may be gone
_CPU_L2_BYTES = 1 << 14  # small, so that interpreted launches group heads too


class Launch:
    """The checked inputs of one attention launch and the arguments that follow from them."""

    def __init__(
        self,
        q: Form,
        k: Form,
        v: Form,
        heads: HeadMap,
        options: AttentionOptions,
    ) -> None:
        if len(q.shape) != 3:
            raise ValueError(f"q has shape {tuple(q.shape)}; expected [T, H, D]")
        problem = kernels_refuse(q.dtype, q.shape[2])
        if problem:
            raise ValueError(problem)
        self.device = q.device
        self.num_heads, self.head_dim = q.shape[1], q.shape[2]
        if options.softmax_scale <= 0.0:
            raise ValueError(f"softmax_scale is {options.softmax_scale}; it must be positive")
        if not options.softcap <= MAX_SOFTCAP:
            raise ValueError(f"softcap is {options.softcap}; supported: up to {MAX_SOFTCAP:g}")
        self.expect("q", q, tuple(q.shape), q.dtype)
        num_kv_heads = heads.kv_head(self.num_heads - 1) + 1 if self.num_heads else 0
        for name, tensor in (("k", k), ("v", v)):
            self.expect(name, tensor, (k.shape[0], num_kv_heads, self.head_dim), q.dtype)
        self.num_kv_heads = num_kv_heads
        self.heads = heads
        self.options = options

    def expect(
        self,
        name: str,
        tensor: Form,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
    ) -> None:
        """Raise a ValueError that names `tensor` unless it is as the kernels need it."""
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {shape}")
        if dtype is not None and tensor.dtype != dtype:
            raise ValueError(f"{name} is {tensor.dtype}; expected {dtype}")
        if tensor.device != self.device:
            raise ValueError(f"{name} is on {tensor.device}; q is on {self.device}")
        if tensor.num_elements and tensor.shape[-1] > 1 and tensor.strides[-1] != 1:
            raise ValueError(f"{name} has last stride {tensor.strides[-1]}; it must be 1")
        far = tensor.strides[0] * _WIDEST_BLOCK >= _INT32
        if tensor.num_elements and len(tensor.shape) == 3 and far:
            raise ValueError(
                f"{name} has token stride {tensor.strides[0]}; "
                f"supported: below {_INT32 // _WIDEST_BLOCK}"
            )

    def fits_descriptors(self, *tensors: Form) -> bool:
        """Return whether the copy engine can read blocks of all `tensors`."""
        power_of_two = self.head_dim & (self.head_dim - 1) == 0
        return power_of_two and self.head_dim >= 16 and all(map(_fits_descriptor, tensors))

    @property
    def scalars(self) -> tuple[int | float, ...]:
        """q_head_start, q_per_kv, scale (of base-2 scores), cap_scale, cap, left, right."""
        mask, scale, cap = self.options
        left, right = (_FAR if side is None else min(side, _FAR) for side in mask)
        in_base_2 = (_LOG2E, scale / cap) if cap > 0.0 else (scale * _LOG2E, 0.0)
        return (self.heads.q_head_start, self.heads.q_per_kv, *in_base_2, cap, left, right)

    @property
    def flags(self) -> dict[str, int | bool]:
        """The compile-time arguments that do not depend on the launch table."""
        return {
            "HEAD_DIM": self.head_dim,
            "D": max(16, triton.next_power_of_2(self.head_dim)),
            **self.score_flags,
            "HAS_RIGHT": self.options.mask.right is not None,
            "UPCAST": bool(triton.knobs.runtime.interpret),
        }

    @property
    def score_flags(self) -> dict[str, bool]:
        """Whether the mask has a left side and scores are capped: compile-time arguments.

        A right side is no argument of the Hopper kernels: one beyond every position costs nothing
        there, and without it the backward in fp16 spilled in its hot loops.
        """
        return {
            "HAS_LEFT": self.options.mask.left is not None,
            "SOFTCAP": self.options.softcap > 0.0,
        }

    def kv_heads_together(self, read: Form, num_tensors: int, per_kv: int) -> int:
        """Return how many KV heads should run together, so that what they read fits the L2 cache.

        Args:
            read: what programs read over and over: keys, or queries.
            num_tensors: how many such tensors.
            per_kv: heads of `read` for each KV head.
        """
        head_bytes = read.shape[0] * read.shape[2] * read.dtype.itemsize * num_tensors * per_kv
        fit = max(1, int(_L2_SHARE * l2_bytes(self.device)) // max(1, head_bytes))
        num_groups = max(1, -(-self.num_kv_heads // fit))
        return max(1, -(-self.num_kv_heads // num_groups))


def _fits_descriptor(tensor: Form) -> bool:
    if not tensor.num_elements:
        return False
    row_bytes = tensor.strides[0] * tensor.dtype.itemsize
    aligned = tensor.aligned and row_bytes % ALIGNMENT == 0 and row_bytes > 0
    return aligned and tensor.blocks(1).shape[1] < _INT32


@cache
def l2_bytes(device: torch.device) -> int:
    """Return the size of the L2 cache."""
    if device.type != "cuda":
        return _CPU_L2_BYTES
    return torch.cuda.get_device_properties(device).L2_cache_size
