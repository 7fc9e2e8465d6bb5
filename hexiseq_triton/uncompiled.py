"""What torch.compile does not look into: it would compile the exchange for each batch anew.

A module of its own, imported while something is compiled: to import the compiler takes seconds, and
imports Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable  # type: ignore[untyped-decorator]
def call(function: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    """Return what `function` returns; to the compiler a graph break."""
    return function(*arguments)
