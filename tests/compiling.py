"""What torch.compile did, counted from zero: the processes of a pool serve many files' tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def counted() -> Iterator[dict[str, Any]]:
    """Torch's counters of graphs and graph breaks, with nothing compiled before or left behind."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    try:
        yield counters
    finally:
        torch.compiler.reset()
        counters.clear()
