"""Plans for ranks that fail, how long the others may wait, and the error that all raise."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from pool import Outcome

from hexiseq_triton.planner import Plan, Split

FIVE = Plan.from_splits([Split((20, 12, 8), (3, 3, 2)), Split((24, 16), (4, 4))], num_kv_heads=2)
THREE = Plan.from_splits([Split((20, 12), (3, 5)), Split((8,), (8,))], num_kv_heads=2)
SHORT = timedelta(seconds=8)


def same_error(outcomes: Sequence[Outcome]) -> tuple[str, str]:
    """Return the kind and text of the error that every rank raised."""
    found = {(outcome.kind, outcome.error) for outcome in outcomes}
    assert len(found) == 1, found
    return found.pop()
