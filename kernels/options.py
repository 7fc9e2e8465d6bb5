"""What one attention call computes, and where its keys stand; shared by reference and kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hexiseq_triton.segments import Mask, Segment

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 256
"""What the Triton kernels take."""
MAX_SOFTCAP = 1e4
"""With 16-bit inputs the kernels' tanh errs by up to 1e-7: a capped score by that times the cap."""


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


class PlacedSegment(NamedTuple):
    """Positions [start, stop) of one document that stand in memory from row `row` on.

    With placed segments one launch sees several chunks of keys that lie anywhere in one buffer.
    """

    document: int
    start: int
    stop: int
    row: int


Segments = Sequence[Segment] | Sequence[PlacedSegment]
"""Rows of a tensor: segments one after the other, or all placed. Placed rows must not overlap."""


def placed(segments: Sequence[Segment], row: int) -> tuple[PlacedSegment, ...]:
    """Place segments one after the other, from row `row` on."""
    found = []
    for segment in segments:
        found.append(PlacedSegment(*segment, row))
        row += segment.num_tokens
    return tuple(found)


def with_rows(segments: Segments) -> list[tuple[Segment, int]]:
    """Return every segment with the row at which it begins."""
    found, row = [], 0
    for segment in segments:
        if isinstance(segment, PlacedSegment):
            row = segment.row
        found.append((Segment(*segment[:3]), row))
        row += segment.stop - segment.start
    return found


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of running state: float64 for float64 inputs, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def kernels_refuse(dtype: torch.dtype, head_dim: int) -> str | None:
    """Say why the Triton kernels do not take queries of a dtype and head dimension."""
    if dtype not in DTYPES:
        return f"q is {dtype}; the kernels take {', '.join(map(str, DTYPES))}"
    if head_dim % 8 or not 0 < head_dim <= MAX_HEAD_DIM:
        return f"q has head dimension {head_dim}; supported: multiples of 8 up to {MAX_HEAD_DIM}"
    return None


def unit_last_stride(x: torch.Tensor) -> torch.Tensor:
    """Return x as kernels take it, copied if neighbours in its last dimension are none in memory.

    The gradient of a sum, say, is one number expanded.
    """
    return x if x.stride(-1) == 1 else x.contiguous()
