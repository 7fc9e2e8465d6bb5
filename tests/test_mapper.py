"""Ranks of several groups map without waiting for each other under different numbers.

PyTorch's part needs GPUs; here is what matters of it: the number that a process counts, under which
its ranks look for each other in a group's store.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch.distributed.distributed_c10d import _get_default_store

from hexiseq_triton import mapper
from hexiseq_triton.agreement import Agreement
from hexiseq_triton.mapper import Mapper
from hexiseq_triton.peer_memory import open_peer_memory

PATIENCE = timedelta(seconds=5)
CPU = torch.device("cpu")
EVERYONE, SOME = (0, 1, 2), (0, 1)
MAPPINGS = SOME, EVERYONE, SOME, SOME, (2,), EVERYONE, EVERYONE
"""Who maps, one after the other."""
GROUPS = EVERYONE, SOME, (0,), (1,), (2,)


class Numbered:
    """Finds the ranks of a group under a number of its process."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self._number = store, 0

    def rendezvous(self, buffer: torch.Tensor, group: dist.ProcessGroup) -> list[int]:
        ranks = dist.get_process_group_ranks(group)
        keys = [f"{ranks} {self._number} {rank}" for rank in ranks]
        self._number += 1
        self._store.set(keys[ranks.index(dist.get_rank())], str(buffer.numel()))
        self._store.wait(keys, PATIENCE)
        return [int(self._store.get(key)) for key in keys]


class World:
    """What a worker needs to map with several groups, each rank's own name first in the store."""

    def __init__(self, rank: int, name: str, in_step: bool) -> None:
        self._rank, self._in_step = rank, in_step
        self._store = dist.PrefixStore(name, _get_default_store())
        self._groups = {ranks: dist.new_group(list(ranks)) for ranks in GROUPS}
        self.torch = Numbered(dist.PrefixStore("torch", self._store))

    def mapper(self, ranks: tuple[int, ...]) -> Mapper:
        agreement = Agreement(dist.PrefixStore(f"{ranks}", self._store), self._rank, PATIENCE)

        def gather(answer: str) -> list[str]:
            found = agreement.gather("count", ranks, answer)
            return found if self._in_step else ["0"] * len(ranks)

        return Mapper(self._groups[ranks], CPU, gather, lambda: self._groups[(self._rank,)])


def mapped(rank: int, name: str, in_step: bool) -> list[list[int]]:
    """Worker: map with one group after the other; return what each found of its ranks."""
    world = World(rank, name, in_step)
    mappers = {ranks: world.mapper(ranks) for ranks in GROUPS if rank in ranks}
    with (
        mock.patch.multiple(mapper, _times=0, _failed=""),
        mock.patch("torch.distributed._symmetric_memory.empty", torch.empty),
        mock.patch("torch.distributed._symmetric_memory.rendezvous", world.torch.rendezvous),
    ):
        return [
            mappers[ranks].map((turn, 2), torch.uint8)[1]
            for turn, ranks in enumerate(MAPPINGS)
            if rank in ranks
        ]


def without_room(rank: int, name: str) -> str:
    """Worker: map where rank 1 has no room; return what is said, and whether more can be mapped."""
    world = World(rank, name, in_step=True)

    def empty(*shape: int, **options: Any) -> torch.Tensor:
        if rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to\nand so on")
        return torch.empty(*shape, **options)

    one = world.mapper(EVERYONE)
    with (
        mock.patch.multiple(mapper, _times=0, _failed=""),
        mock.patch("torch.distributed._symmetric_memory.empty", empty),
        pytest.raises(RuntimeError) as raised,
    ):
        one.map((3,), torch.uint8)
    assert not one.obstacle
    return str(raised.value)


@pytest.fixture(scope="module")
def three() -> Iterator[Pool]:
    with Pool(3) as started:
        yield started


def test_ranks_of_more_and_of_fewer_groups_map_together(three: Pool) -> None:
    expected = [
        [[2 * turn] * len(ranks) for turn, ranks in enumerate(MAPPINGS) if rank in ranks]
        for rank in range(3)
    ]
    assert three.run(mapped, "in step", True) == expected
    with pytest.raises(AssertionError, match="timeout"):  # what this test is about
        three.run(mapped, "each by itself", False)


def test_every_rank_says_who_has_no_room(three: Pool) -> None:
    (said,) = set(three.run(without_room, "no room"))
    assert said == "rank 1 has no room for (3,) torch.uint8 to share: CUDA out of memory. Tried to"


def test_what_failed_once_is_not_tried_again() -> None:
    def refuse(buffer: torch.Tensor, group: object) -> None:
        raise RuntimeError("operation not permitted\nat some place")

    one = Mapper(mock.Mock(), CPU, lambda answer: [answer], mock.Mock())
    with (
        mock.patch.multiple(mapper, _times=0, _failed=""),
        mock.patch("torch.distributed._symmetric_memory.empty", torch.empty),
        mock.patch("torch.distributed._symmetric_memory.rendezvous", refuse),
        mock.patch("torch.distributed.get_rank", return_value=1),
    ):
        with pytest.raises(RuntimeError, match="not permitted"):
            one.map((1,), torch.uint8)
        assert one.obstacle == "mapping failed before: operation not permitted"
        memory, path = open_peer_memory(one, PATIENCE, "the head all-to-all")
        assert memory is None
        assert path == "NCCL: mapping failed before: operation not permitted"


def test_training_writes_into_what_was_mapped_in_inference_mode() -> None:
    alone = mock.Mock()
    with (
        mock.patch.multiple(mapper, _times=0, _failed=""),
        mock.patch("torch.distributed._symmetric_memory.empty", torch.empty),
        mock.patch("torch.distributed._symmetric_memory.rendezvous"),
        torch.inference_mode(),
    ):
        buffer, _ = Mapper(alone, CPU, lambda answer: [answer], lambda: alone).map((8,), torch.int8)

    with torch.no_grad():  # as backward does
        assert buffer[:4].copy_(torch.arange(4)).tolist() == [0, 1, 2, 3]
