"""A first call that takes long says why, and a quick one says nothing."""

from __future__ import annotations

import time

import pytest

from hexiseq_triton.slow_start import told_if_slow


def test_only_a_slow_first_call_is_explained(caplog: pytest.LogCaptureFixture) -> None:
    with told_if_slow("forward", 10.0):
        pass
    assert not caplog.messages

    with told_if_slow("backward", 0.01):
        time.sleep(0.3)
    (message,) = caplog.messages
    assert message.startswith("compiling attention's kernels: the first backward takes longer than")


def test_an_error_passes_through_and_ends_the_wait(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="no"), told_if_slow("forward", 0.05):
        raise ValueError("no")
    time.sleep(0.1)
    assert not caplog.messages
