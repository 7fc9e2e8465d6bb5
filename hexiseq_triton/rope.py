"""Rotary position embedding, given to attention: tables, their form, and what they turn.

Source: Su et al., arXiv:2104.09864.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hexiseq_triton.errors import InputError
from hexiseq_triton.flash import check_tensor
from hexiseq_triton.kernels import state_dtype
from hexiseq_triton.kernels.rotation import Rotation, turn


@dataclass(frozen=True)
class Rope:
    """How q and k turn by their positions.

    Attributes:
        cos: [T, R / 2], or [T, R] with each pair's number twice, in any float dtype.
        sin: as cos.
        interleaved: pair dimension 2 i with 2 i + 1 (GPT-J), not i with i + R / 2 (Llama).
        rotary_dim: R, how many of the first dimensions turn; None is the whole head.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False
    rotary_dim: int | None = None

    @property
    def style(self) -> str:
        """What every rank must give alike."""
        pairs = "interleaved" if self.interleaved else "half-split"
        return f"rope {pairs}, rotary_dim {self.rotary_dim}"

    def rotation(self, x: torch.Tensor) -> Rotation:
        """Return the rotation of x [T, H, D], with one number a pair.

        Raises:
            InputError: if the tables don't fit x, or ask for a gradient.
        """
        rotary_dim = x.shape[-1] if self.rotary_dim is None else self.rotary_dim
        if not 0 < rotary_dim <= x.shape[-1] or rotary_dim % 2:
            raise InputError(
                f"rope's rotary_dim is {rotary_dim}; it must be even, from 2 to {x.shape[-1]}"
            )
        for name, table in (("cos", self.cos), ("sin", self.sin)):
            _check(name, table, x, rotary_dim)
        return Rotation(
            self._of_pairs(self.cos, x, rotary_dim),
            self._of_pairs(self.sin, x, rotary_dim),
            self.interleaved,
        )

    def _of_pairs(self, table: torch.Tensor, x: torch.Tensor, rotary_dim: int) -> torch.Tensor:
        """Return a table as [T, R / 2]: a view, unless x has no use for its float64."""
        half = rotary_dim // 2
        if table.dtype == torch.float64:
            table = table.to(state_dtype(x.dtype))
        if table.shape[1] == half:
            return table
        return table[:, ::2] if self.interleaved else table[:, :half]


RopeLike = Rope | tuple[torch.Tensor, torch.Tensor]
"""A Rope, or (cos, sin) of the half-split form over the whole head."""


def as_rope(rope: RopeLike) -> Rope:
    """Return what was given as a Rope.

    Raises:
        InputError: if it is neither one nor (cos, sin).
    """
    if isinstance(rope, Rope):
        return rope
    if not isinstance(rope, Sequence) or len(rope) != 2:
        raise InputError(f"rope is a {type(rope).__name__}; pass (cos, sin) or a Rope")
    return Rope(*rope)


def rope_tables(
    position_ids: torch.Tensor, head_dim: int, theta: float = 10000.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cos, sin), each [T, D / 2] float32, for tokens at `position_ids` [T].

    For partial rotary give the number of dimensions that turn as `head_dim`.
    """
    exponents = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=torch.float32)
    frequencies = theta ** (-exponents / head_dim)  # in float32, as models were trained with
    # at position 2^20 the product in float32 is off by up to 0.03
    angles = position_ids[:, None].double() * frequencies.double()
    return angles.cos().float(), angles.sin().float()


def apply_rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
) -> torch.Tensor:
    """Turn x [T, H, D]; computed in float32 (float64 for float64), returned in the dtype of x.

    The arguments are those of `Rope`.

    Raises:
        InputError: if the tables don't fit x, or ask for a gradient.
    """
    return turn(x, Rope(cos, sin, interleaved, rotary_dim).rotation(x)).to(x.dtype)


def _check(name: str, table: torch.Tensor, x: torch.Tensor, rotary_dim: int) -> None:
    check_tensor(f"rope's {name}", table)
    rows, half = x.shape[0], rotary_dim // 2
    if table.shape not in ((rows, half), (rows, rotary_dim)):
        raise InputError(
            f"rope's {name} has shape {tuple(table.shape)}; it must be ({rows}, {half}) or "
            f"({rows}, {rotary_dim}) where {rotary_dim} dimensions turn"
        )
    if not table.dtype.is_floating_point:
        raise InputError(f"rope's {name} is {table.dtype}; it must be a floating dtype")
    if table.device != x.device:
        raise InputError(f"rope's {name} is on {table.device}; q and k are on {x.device}")
    if table.requires_grad:
        raise InputError(
            f"rope's {name} requires grad; gradients of the tables are not supported: detach it"
        )
