"""Who shares memory with whom: decided alike on all ranks, and said once where nobody does."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch

from hexiseq_triton import peer_memory
from hexiseq_triton.mapper import Mapper

CPU = torch.device("cpu")
GRANULE = 32 << 20


def opened(answers: Sequence[str], rank: int, tried: Sequence[str] = ("", "")) -> tuple[Any, str]:
    """Open the memory of two ranks whose answers are given, as rank `rank` sees it."""
    rounds = iter((list(answers), list(tried)))
    with (
        mock.patch.object(peer_memory, "_answer", return_value=answers[rank]),
        mock.patch.object(peer_memory, "_tried", return_value=tried[rank]),
        mock.patch("torch.distributed.get_rank", return_value=rank),
    ):
        mapper = Mapper(mock.Mock(), CPU, lambda answer: next(rounds), mock.Mock())
        return peer_memory.open_peer_memory(mapper, timedelta(seconds=1), "the head all-to-all")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("answers", "tried", "reason"),
    [
        (("host a", "a GPU is older than Ampere"), ("", ""), "a GPU is older than Ampere"),
        (("host a", "host b"), ("", ""), "the group's ranks are on several hosts"),
        (("host a", "host a"), ("", "CUDA error: mapping failed"), "CUDA error: mapping failed"),
    ],
)
def test_what_stands_in_one_ranks_way_lets_all_send_messages(
    answers: tuple[str, str],
    tried: tuple[str, str],
    reason: str,
    rank: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    memory, path = opened(answers, rank, tried)
    assert memory is None
    assert path == f"NCCL: {reason}"
    assert len(caplog.records) == (rank == 0)


def test_ranks_of_one_host_share_memory(caplog: pytest.LogCaptureFixture) -> None:
    memory, path = opened(("host a", "host a"), 0)
    assert isinstance(memory, peer_memory.PeerMemory)
    assert path == "symmetric memory"
    assert not caplog.records


def test_buffers_grow_part_by_part_and_an_empty_part_takes_nothing() -> None:
    taken = []

    def mapped(shape: tuple[int], dtype: torch.dtype) -> tuple[torch.Tensor, object]:
        taken.append(shape[0] // GRANULE)
        return torch.empty(shape, dtype=dtype, device="meta"), object()

    memory = peer_memory.PeerMemory(mock.Mock(device=CPU, map=mapped), timedelta(seconds=1))
    with (
        mock.patch("torch.distributed.barrier") as barrier,
        mock.patch("torch.cuda.synchronize"),
    ):
        for sizes in ((1,), (GRANULE,), (GRANULE + 1,), (1, 1), (1, GRANULE), (5 * GRANULE, 1)):
            memory.reserve(*sizes)
    assert taken == [1, 2, 3, 6]
    assert memory.out == 5 * GRANULE
    assert barrier.call_count == 3  # others may still read what goes
