"""Fixtures shared by the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from pool import Pool

# a busy machine is no fault of the code
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


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


@pytest.fixture(scope="session")
def ready(pool: Pool) -> Pool:
    """The pool, once every process has imported transformers."""
    from small_models import import_all

    pool.run(import_all)
    return pool
