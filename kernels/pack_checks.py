"""What pack and unpack take: forms of tensors, buffers and rotations that fit each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hexiseq_triton.kernels.forms import Form, forms
from hexiseq_triton.kernels.options import DTYPES, MAX_HEAD_DIM
from hexiseq_triton.kernels.pieces import Pieces
from hexiseq_triton.kernels.rotation import Rotation

MOST_TENSORS = 3


class Turned(NamedTuple):
    """The form of a rotation."""

    cos: Form
    sin: Form
    interleaved: bool

    @classmethod
    def of(cls, rotation: Rotation) -> Turned:
        cos, sin = forms((rotation.cos, rotation.sin))
        return cls(cos, sin, rotation.interleaved)


def check_tensors(tensors: Sequence[Form], pieces: Pieces) -> None:
    num_heads = pieces.num_heads
    least = 1 + max(num_heads, default=0)
    if not least <= len(tensors) <= MOST_TENSORS:
        raise ValueError(f"got {len(tensors)} tensors; expected {least} to {MOST_TENSORS}")
    like = tensors[0]
    for i, x in enumerate(tensors):
        if len(x.shape) != 3:
            raise ValueError(f"tensor {i} has shape {tuple(x.shape)}; expected [T, H, D]")
        if x.shape[1] < num_heads.get(i, 0):
            raise ValueError(f"tensor {i} has {x.shape[1]} heads; its pieces {num_heads[i]}")
        _check_dtype(f"tensor {i}", x.dtype)
        if (x.shape[0], x.shape[2]) != (like.shape[0], like.shape[2]):
            raise ValueError(
                f"tensor {i} has shape {tuple(x.shape)}, tensor 0 {tuple(like.shape)}; "
                "tokens and head dimension must agree"
            )
        if x.dtype != like.dtype or x.device != like.device:
            raise ValueError(
                f"tensor {i} is {x.dtype} on {x.device}, tensor 0 {like.dtype} on {like.device}"
            )
        if x.num_elements and x.strides[2] != 1:
            raise ValueError(f"tensor {i} has last stride {x.strides[2]}; it must be 1")
    if like.shape[2] % 8 or not 0 < like.shape[2] <= MAX_HEAD_DIM:
        raise ValueError(
            f"head dimension {like.shape[2]} is not supported; multiples of 8 up to {MAX_HEAD_DIM}"
        )


def check_buffer(name: str, buffer: Form, slots: int, dtype: torch.dtype, like: Form) -> None:
    _check_dtype(name, buffer.dtype)
    d = like.shape[2]
    if len(buffer.shape) != 2 or buffer.shape[1] != d or not buffer.is_contiguous:
        raise ValueError(
            f"{name} has shape {tuple(buffer.shape)} and strides {buffer.strides}; "
            f"expected [slots, {d}], contiguous"
        )
    if buffer.shape[0] < slots:
        raise ValueError(f"{name} has {buffer.shape[0]} slots; its pieces need {slots}")
    if buffer.dtype != dtype or buffer.device != like.device:
        raise ValueError(
            f"{name} is {buffer.dtype} on {buffer.device}; expected {dtype} on {like.device}"
        )


def check_rotation(turned: Turned, like: Form) -> None:
    for name, table in (("cos", turned.cos), ("sin", turned.sin)):
        _check_dtype(name, table.dtype)
        same = table.shape == turned.cos.shape and table.shape[0] == like.shape[0]
        if len(table.shape) != 2 or not same:
            raise ValueError(
                f"{name} has shape {tuple(table.shape)}; expected [{like.shape[0]}, R / 2]"
            )
        if table.device != like.device:
            raise ValueError(f"{name} is on {table.device}, the tensors on {like.device}")
    num_turned = 2 * turned.cos.shape[1]
    if num_turned > like.shape[2]:
        raise ValueError(f"{num_turned} dimensions turn; the head dimension is {like.shape[2]}")


def _check_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"{name} is {dtype}; the kernel takes {', '.join(map(str, DTYPES))}")
