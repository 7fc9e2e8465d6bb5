"""Rotary position embedding, half-split form: dimension i turns together with dimension i + D/2.

Source: Su et al., arXiv:2104.09864.
"""

from __future__ import annotations

import torch

from hexiseq_triton.errors import InputError


def rope_tables(
    position_ids: torch.Tensor, head_dim: int, theta: float = 10000.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cos, sin), each [T, D / 2] float32, for tokens at `position_ids` [T]."""
    exponents = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=torch.float32)
    angles = position_ids[:, None].float() * theta ** (-exponents / head_dim)
    return angles.cos(), angles.sin()


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn x [T, H, D] by (cos, sin), each [T, D / 2], or [T, D] with both halves alike.

    Raises:
        InputError: if the tables don't fit x.
    """
    half = x.shape[-1] // 2
    for name, table in (("cos", cos), ("sin", sin)):
        if (
            table.dim() != 2
            or table.shape[0] != x.shape[0]
            or table.shape[1] not in (half, 2 * half)
        ):
            raise InputError(
                f"rope's {name} has shape {tuple(table.shape)}; it must be ({x.shape[0]}, {half}) "
                f"or ({x.shape[0]}, {2 * half})"
            )
    cos, sin = cos[:, None, :half], sin[:, None, :half]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
