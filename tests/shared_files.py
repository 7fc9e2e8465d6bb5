"""Memory and counters that processes on one CPU share, in place of what GPUs reach at each other.

Everything fetched from a peer passes a file that both map; a wait looks at the peer's counter until
it is as far. Ranks come late at random, so that what is not waited for is seen.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist

from hexiseq_triton.context import ParallelContext
from hexiseq_triton.peer_routes import PeerRoutes
from hexiseq_triton.signals import Count

_BYTES = 8 << 20  # for each part
_GROUP_BYTES = 32 << 10  # of a rank in its group
_PATIENCE_SECONDS = 20.0


class FileMemory:
    """See `peer_memory.PeerMemory`."""

    out = _BYTES

    def __init__(self, folder: Path, size: int, number: int) -> None:
        self._number = number
        self._buffers = [
            torch.from_file(
                str(folder / f"memory {i}"), shared=True, size=2 * _BYTES, dtype=torch.uint8
            )
            for i in range(size)
        ]
        self._buffers[number].fill_(255)  # NaN in every floating dtype

    def reserve(self, in_bytes: int, out_bytes: int = 0) -> None:
        assert max(in_bytes, out_bytes) <= _BYTES

    def local(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self.remote(self._number, offset, shape, dtype)

    def remote(
        self, peer: int, offset: int, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        num_bytes = prod(shape) * dtype.itemsize
        return self._buffers[peer][offset : offset + num_bytes].view(dtype).view(*shape)


class GroupMemory:
    """See `peer_memory.PeerMemory`; all buffers in one file, so that one view reaches another's.

    Attributes:
        everything: the buffers of all ranks.
        part: barriers passed until now.
    """

    def __init__(self, file: Path, group: dist.ProcessGroup) -> None:
        self._group, self._number = group, dist.get_rank(group)
        self._size = dist.get_world_size(group)
        self.everything = torch.from_file(
            str(file), shared=True, size=self._size * _GROUP_BYTES, dtype=torch.uint8
        )
        self.local(0, (_GROUP_BYTES,), torch.uint8).fill_(255)  # NaN in every floating dtype
        self.part = 0

    def reserve(self, in_bytes: int, out_bytes: int = 0) -> None:
        assert in_bytes <= _GROUP_BYTES
        assert out_bytes == 0

    def local(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self.remote(self._number, offset, shape, dtype)

    def remote(
        self, peer: int, offset: int, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        start = peer * _GROUP_BYTES + offset
        stop = start + prod(shape) * dtype.itemsize
        assert stop <= (peer + 1) * _GROUP_BYTES
        return self.everything[start:stop].view(dtype).view(*shape)

    def distances(self) -> tuple[int, ...]:
        return tuple((peer - self._number) * _GROUP_BYTES for peer in range(self._size))

    def barrier(self) -> None:
        dist.barrier(self._group)
        self.part += 1


class FileCounters:
    """See `signals.Signals`."""

    def __init__(self, folder: Path, size: int, number: int) -> None:
        self._number = number
        self._late = random.Random(number)
        self._counters = [
            torch.from_file(
                str(folder / f"counters {i}"),
                shared=True,
                size=len(Count) * size,
                dtype=torch.int32,
            ).view(len(Count), size)
            for i in range(size)
        ]

    def send(self, peer: int, what: Count, count: int) -> None:
        self._come_late()
        self._counters[peer][what, self._number] = count

    def wait(self, peer: int, what: Count, count: int) -> None:
        until = time.monotonic() + _PATIENCE_SECONDS
        while self._counters[self._number][what, peer] < count:
            if time.monotonic() > until:
                raise AssertionError(f"rank {self._number} waits for {what.name} of {peer}")
            time.sleep(1e-4)
        self._come_late()

    def close(self) -> None:
        pass

    def _come_late(self) -> None:
        if self._late.random() < 0.1:
            time.sleep(self._late.uniform(0.0, 3e-3))


def share_files(context: ParallelContext, folder: Path) -> None:
    """Let a context exchange keys through files in `folder`; a call of all ranks."""
    if context.replica is None or len(context.plan.replicas[context.replica].groups) == 1:
        return
    ranks = sorted(context.replica_ranks)
    own = folder / f"replica {context.replica}"
    own.mkdir(exist_ok=True)
    number = ranks.index(context.rank)
    memory, counters = (each(own, len(ranks), number) for each in (FileMemory, FileCounters))
    context.gather_in_replica("files", "mapped")
    context.peer_routes = PeerRoutes(memory, counters, ranks, context.rank, context.device)
