"""Fixtures shared by the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Five processes in one gloo world, kept for the whole session."""
    with Pool(5) as started:
        yield started


@pytest.fixture
def fresh_pool() -> Iterator[Pool]:
    """Three processes for a test that breaks them."""
    with Pool(3) as started:
        yield started
