"""Launches that are kept from call to call with their tables, and a bound on what these take.

Each batch of packed documents has tables of its own, some megabytes at a million tokens. What
follows from a call's forms alone is small, and a number is bound enough.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

MOST_KEPT = 512
"""Launches that each kernel keeps, with a table of its own or without, and tile maps."""
MOST_BYTES = 256 << 20
"""Of all tables."""

_T = TypeVar("_T")

_forget: list[Callable[[], None]] = []
_num_bytes = 0


def kept(make: Callable[..., _T]) -> Callable[..., _T]:
    """Keep what a function returns, for the same arguments, while there is room."""
    cached = lru_cache(maxsize=MOST_KEPT)(make)
    _forget.append(cached.cache_clear)
    return cached


def count_table(num_bytes: int) -> None:
    """Count a table that is about to be kept; if they are too large together, forget all others.

    Which are in use is not known, and to make those again costs milliseconds.
    """
    global _num_bytes
    _num_bytes += num_bytes
    if _num_bytes > MOST_BYTES:
        for forget in _forget:
            forget()
        _num_bytes = num_bytes
