"""Settings of PyTorch that the environment leaves open, and what it must say of the others."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
from pool import free_port
from typer.testing import CliRunner

from hexiseq_triton.cli import app
from hexiseq_triton.environment import DUMP_MILLISECONDS, settle_environment, start_world
from hexiseq_triton.errors import ConfigError, PeerError

RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

ALLOCATOR, OLD_NAME = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
DUMP = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ALLOCATOR, OLD_NAME, DUMP, *RENDEZVOUS):
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


@pytest.mark.parametrize("given", [(), ("RANK",), RENDEZVOUS[:3]])
def test_without_torchrun_the_line_that_starts_it_is_told(
    monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...]
) -> None:
    for name in given:
        monkeypatch.setenv(name, "0")
    missing = ", ".join(RENDEZVOUS[len(given) :])
    with pytest.raises(ConfigError, match=rf"lacks {missing}, which torchrun sets") as raised:
        start_world(torch.device("cpu"), timedelta(seconds=1))
    assert "torchrun --nproc-per-node 4 script.py" in str(raised.value)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_peers_that_do_not_come_are_told_with_address_and_timeout(
    monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    port = str(free_port())
    for name, value in zip(RENDEZVOUS, (rank, "2", "127.0.0.1", port), strict=True):
        monkeypatch.setenv(name, value)
    says = rf"rank {rank}: the 2 processes did not meet at 127.0.0.1:{port} \(timeout 1 s\): "
    with pytest.raises(PeerError, match=says) as raised:
        start_world(torch.device("cpu"), timedelta(seconds=1))
    assert "\n" not in str(raised.value)


def test_training_with_a_rank_alone_is_told_how_to_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    result = CliRunner().invoke(app, ["train", "--plan", "p.json", "--config", "t.yaml"])
    assert result.exit_code == 2
    assert "`hexiseq launch --plan p.json --config t.yaml --hosts" in result.stderr
