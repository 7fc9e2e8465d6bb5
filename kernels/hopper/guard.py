"""When the Hopper kernels run: on what they were verified for, and what compiled as it should.

They lean on details of one compiler: a newer one may be right and yet slow. So they run with the
Triton versions below, and only while a compiled kernel keeps its registers; else the portable
kernels run, and the log says why, once. With HEXISEQ_HOPPER=0 in the environment they never run;
HEXISEQ_HOPPER=exact is for those who want the accuracy of exact row maxima. Set it before the first
call: what launches look like is remembered.
"""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from typing import Any

import torch
import triton

from hexiseq_triton.kernels.prepared import Prepared

VERIFIED = ("3.6", "3.7.1", "3.8.0")
"""Triton versions whose kernels were checked on a card: results, speed and machine code. The last
number may be left out."""

HEAD_DIMS = {
    "forward": (64, 128, 256),
    "backward": (64, 128),
    "grad_kv": (128, 256),  # at 64 the portable kernel is faster
    "grad_q": (256,),
}
DTYPES = (torch.bfloat16, torch.float16)
MOST_SPILLS = 40
"""Registers of a thread that may stand in memory: what a tile needs, outside of the hot loops."""

_log = logging.getLogger(__name__)
_spilled: set[tuple[str, torch.dtype, int]] = set()


def runs(direction: str, x: torch.Tensor) -> bool:
    """Return whether the Hopper kernel takes tensors like `x` [T, H, D], for a key of HEAD_DIMS.

    That the copy engine can read them is for the launcher to check.
    """
    return _runs(direction, x.device, x.dtype, x.shape[2])


@lru_cache(maxsize=256)
def _runs(direction: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    if dtype not in DTYPES or head_dim not in HEAD_DIMS[direction]:
        return False
    return _verified() and (direction, dtype, head_dim) not in _spilled


def exact_maximum() -> bool:
    """Return whether the forward is to use exact row maxima, at the cost of some speed."""
    return os.environ.get("HEXISEQ_HOPPER") == "exact"


def is_verified(version: str) -> bool:
    """Return whether the kernels were checked with this Triton."""
    numbers = version.split("+")[0]
    return f"{numbers}.".startswith(tuple(f"{known}." for known in VERIFIED))


@lru_cache(maxsize=1)
def _verified() -> bool:
    if os.environ.get("HEXISEQ_HOPPER") == "0":
        return False
    version = triton.__version__
    if is_verified(version):
        return True
    _log.warning(
        "Triton %s is not among the versions verified for the Hopper kernels (%s): "
        "the portable kernels run",
        version,
        ", ".join(VERIFIED),
    )
    return False


class Guarded:
    """A launch that looks at what the compiler made of its kernel, after it ran first."""

    def __init__(self, work: Prepared, direction: str, dtype: torch.dtype, head_dim: int) -> None:
        self._work = work
        self._kind = (direction, dtype, head_dim)
        self._seen = False

    def __call__(self, *tensors: Any) -> None:
        """Launch on the current stream."""
        self._work(*tensors)
        if not self._seen:
            self._seen = True
            check(self._kind, self._work.num_spills)


def check(kind: tuple[str, torch.dtype, int], num_spills: int) -> None:
    """Let the portable kernels do this kind of launch from now on if this one spills."""
    if num_spills <= MOST_SPILLS or kind in _spilled:
        return
    _spilled.add(kind)
    _runs.cache_clear()
    direction, dtype, head_dim = kind
    _log.warning(
        "the Hopper %s kernel for %s and head dimension %d keeps %d registers in memory with "
        "Triton %s, %d are fine: the portable kernel runs from now on",
        direction, dtype, head_dim, num_spills, triton.__version__, MOST_SPILLS,
    )  # fmt: skip
