"""Rotary position embedding: pairs of dimensions turn by an angle that grows with the position.

    a' = a cos - b sin,   b' = b cos + a sin

Half-split (Llama, Hugging Face) pairs dimension i with i + R / 2, interleaved (GPT-J) 2 i with
2 i + 1. Only the first R dimensions turn, the others stay. The inverse turns by the negative
angle; it is also the backward, since a rotation's inverse is its transpose.

Source: Su et al., arXiv:2104.09864.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hexiseq_triton.kernels.options import state_dtype


class Rotation(NamedTuple):
    """The angles of T tokens: `cos` and `sin`, each [T, R / 2] in any float dtype and strides."""

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False

    @property
    def num_turned(self) -> int:
        """Dimensions that turn, R."""
        return 2 * self.cos.shape[1]

    def inverse(self) -> Rotation:
        """Return the rotation that undoes this one."""
        return self._replace(sin=-self.sin)


def turn(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Return x [T, H, D] turned, in the state dtype of x, in which it is computed."""
    x = x.to(state_dtype(x.dtype))
    cos, sin = (table[:, None].to(x.dtype) for table in (rotation.cos, rotation.sin))
    turning, rest = x[..., : rotation.num_turned], x[..., rotation.num_turned :]
    if rotation.interleaved:
        a, b = turning[..., 0::2], turning[..., 1::2]
        pairs = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1)
        return torch.cat((pairs.flatten(-2), rest), dim=-1)
    a, b = turning.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)
