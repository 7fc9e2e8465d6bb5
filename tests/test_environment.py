"""Settings of PyTorch that the environment leaves open."""

from __future__ import annotations

import os

import pytest

from hexiseq_triton.environment import DUMP_MILLISECONDS, settle_environment

ALLOCATOR, OLD_NAME = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
DUMP = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ALLOCATOR, OLD_NAME, DUMP):
        monkeypatch.setenv(name, "")  # so that it is put back as it was
        monkeypatch.delenv(name)


def test_segments_grow_and_a_dead_peer_is_not_mourned_long() -> None:
    settle_environment()
    assert os.environ[ALLOCATOR] == "expandable_segments:True"
    assert int(os.environ[DUMP]) == DUMP_MILLISECONDS < 10_000 / 4


@pytest.mark.parametrize("name", [ALLOCATOR, OLD_NAME, DUMP])
def test_what_the_user_says_stands(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    settle_environment()
    assert os.environ[name] == "1"
    if name == OLD_NAME:
        assert ALLOCATOR not in os.environ
