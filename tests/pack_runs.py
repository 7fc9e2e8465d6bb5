"""Heads and rotations to pack and unpack, on a GPU or in Triton's interpreter.

The interpreter must be chosen before Triton is imported: import this module first.
"""

from __future__ import annotations

import os

import pytest
import torch

from hexiseq_triton.kernels.rotation import Rotation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = DEVICE == "cpu"
if INTERPRETED:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the first import of Triton
pytest.importorskip("triton")

MARKS = [
    *([pytest.mark.gpu] if DEVICE == "cuda" else []),
    # the interpreter turns loop bounds into ints
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]
"""Of a module that packs: its `pytestmark`."""

FP32 = torch.float32


def random(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


ROTATIONS = {
    "half-split": (False, 1.0),
    "interleaved": (True, 1.0),
    "half-split, partial": (False, 0.25),
    "interleaved, partial": (True, 0.5),
}


def rotation_of(name: str, num_tokens: int, head_dim: int, dtype: torch.dtype = FP32) -> Rotation:
    interleaved, share = ROTATIONS[name]
    angles = random(num_tokens, max(1, int(head_dim * share / 2)), seed=1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    if interleaved:  # as views of tables that hold each number twice
        cos, sin = (table.repeat_interleave(2, dim=1)[:, ::2] for table in (cos, sin))
    return Rotation(cos, sin, interleaved)
