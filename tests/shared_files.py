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

from hexiseq_triton.context import ParallelContext
from hexiseq_triton.peer_routes import PeerRoutes
from hexiseq_triton.signals import Count

_BYTES = 8 << 20  # for each direction
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

    def reserve(self, in_bytes: int, out_bytes: int) -> None:
        assert max(in_bytes, out_bytes) <= _BYTES

    def local(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self.remote(self._number, offset, shape, dtype)

    def remote(
        self, peer: int, offset: int, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        num_bytes = prod(shape) * dtype.itemsize
        return self._buffers[peer][offset : offset + num_bytes].view(dtype).view(*shape)


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
