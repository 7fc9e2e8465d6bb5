"""The parts of Gluon that changed between Triton versions, under one name each."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hexiseq_triton.kernels.forms import Blocks

__all__ = [
    "AHEAD_AT_64",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "partition_barrier",
    "tma",
    "tma_add",
    "warpgroup_mma",
    "warpgroup_mma_wait",
    "with_layout",
]

AHEAD_AT_64 = gl.constexpr(not triton.__version__.startswith("3.6."))
"""Whether the backward at head dimension 64 is faster when it reads numbers ahead: 2 to 4% slower
with 3.6, 5% faster with 3.7.1, 0.5% with 3.8.0. The same instructions come in another order."""
partition_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""Wait for all threads of this warp-specialised partition; renamed in 3.7."""


@builtin
def tma_add(target, coord, source, _semantic=None):
    """Let the copy engine add a shared tile to global memory; 3.6 has the operation, no wrapper."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, target.handle, coord, source.handle
    )


class GluonBlocks(NamedTuple):
    """`Blocks` with the layout that they get in shared memory."""

    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    layout: Any

    def of(self, tensor: torch.Tensor) -> TensorDescriptor:
        """Return the descriptor of `tensor`."""
        return TensorDescriptor(tensor, *self)


def with_layout(blocks: Blocks, dtype: torch.dtype) -> GluonBlocks:
    """Return blocks of a tensor of `dtype` with the layout that the tensor cores read."""
    return GluonBlocks(*blocks, _shared_layout(tuple(blocks.block_shape), dtype))


@cache
def _shared_layout(block_shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
    return gl.NVMMASharedLayout.get_default_for(list(block_shape), element[dtype])
