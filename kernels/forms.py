"""Tensors without their contents: the keys under which checked and prepared launches are kept.

All checks and nearly all kernel arguments follow from the forms of the tensors, and a training step
repeats the same few forms in every layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

ALIGNMENT = 16
"""Bytes: what the compiler assumes of an address that is a multiple of it."""

BOUND = 1 << 30
"""More rows than any tensor has; see `bounded_blocks`."""
_ANY = 0x7FFF0000  # an extent that bounds nothing


class Blocks(NamedTuple):
    """How a tensor descriptor cuts a tensor: as one matrix with the columns of all heads."""

    shape: list[int]
    strides: list[int]
    block_shape: list[int]

    def of(self, tensor: torch.Tensor) -> TensorDescriptor:
        """Return the descriptor of a tensor."""
        return TensorDescriptor(tensor, *self)


class Form(NamedTuple):
    """All of a tensor but its address and its elements.

    `aligned`: the address is a multiple of ALIGNMENT. `strides` are in elements.
    """

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    aligned: bool

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def row_strides(self) -> tuple[int, int]:
        """Strides of tokens and heads, of a form [T, H, D]."""
        return self.strides[0], self.strides[1]

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size > 1 and stride != expected:
                return not self.num_elements
            expected *= size
        return True

    def blocks(self, num_rows: int) -> Blocks:
        """Return how blocks of `num_rows` tokens of one head are cut from [T, H, D]."""
        tokens, heads, head_dim = self.shape
        stride_t, stride_h = self.row_strides
        columns = (heads - 1) * stride_h + head_dim
        return Blocks([tokens, columns], [stride_t, 1], [num_rows, head_dim])


def bounded_blocks(form: Form, num_rows: int) -> Blocks:
    """Return how a form is cut if the copy engine is to stop at any row: it then fills in zeros.

    The matrix gets two more dimensions in front, of rows again. With B = BOUND, the block at
    [B, y, B - n, column] begins n rows before row y, and the third dimension ends at B, n rows on.
    The first one's stride takes the B rows off again: B times 2**34 is 0 in 64-bit addresses.

    Source: the ragged descriptors of triton.tools.ragged_tma.
    """
    (_, columns), (stride, _), block_shape = form.blocks(num_rows)
    shape = [_ANY, _ANY, BOUND, columns]
    return Blocks(shape, [(1 << 34) - stride, stride, stride, 1], [1, 1, *block_shape])


def forms(tensors: Iterable[torch.Tensor]) -> list[Form]:
    """Return the forms of some tensors."""
    # the constructor that NamedTuple generates would take as long as all the rest
    new = tuple.__new__
    return [
        new(Form, (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % ALIGNMENT == 0))
        for x in tensors
    ]


def form(tensor: torch.Tensor) -> Form:
    """Return the form of a tensor."""
    return forms((tensor,))[0]
