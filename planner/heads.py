"""Head intervals, and which KV heads a run of query heads reads."""

from __future__ import annotations

HeadRange = tuple[int, int]
"""Heads [start, stop)."""


def kv_heads_of(q_heads: HeadRange, q_per_kv: int) -> HeadRange:
    """Return the KV heads that the query heads [start, stop) read; none for no query heads."""
    start, stop = q_heads
    if start == stop:
        return (start // q_per_kv, start // q_per_kv)
    return (start // q_per_kv, -(-stop // q_per_kv))
