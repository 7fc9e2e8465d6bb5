"""What one attention call computes: mask, scale, softcap; shared by reference and kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hexiseq_triton.segments import Mask


class AttentionOptions(NamedTuple):
    """The score of query i and key j is `softmax_scale * q_i . k_j`, capped where softcap > 0.

    With a cap c the score s becomes c * tanh(s / c). The mask then removes keys.
    """

    mask: Mask
    softmax_scale: float
    softcap: float = 0.0


class HeadMap(NamedTuple):
    """Which KV head a query head reads.

    Local query head i is head `q_head_start + i` of the model; the local KV heads begin with the
    one that the first local query head reads.
    """

    q_head_start: int
    q_per_kv: int

    def kv_head(self, i: int) -> int:
        """Return the local KV head that local query head i reads."""
        return (self.q_head_start + i) // self.q_per_kv - self.q_head_start // self.q_per_kv


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of running state: float64 for float64 inputs, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def unit_last_stride(x: torch.Tensor) -> torch.Tensor:
    """Return x as kernels take it, copied if neighbours in its last dimension are none in memory.

    The gradient of a sum, say, is one number expanded.
    """
    return x if x.stride(-1) == 1 else x.contiguous()
