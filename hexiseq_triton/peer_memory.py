"""Memory that the ranks of one group can reach at each other, over NVLink or PCIe in one host.

Each rank holds buffers of the same size; a kernel reads and writes a peer's as it does its own.
What lies where follows from the plan, so ranks only agree on when: `barrier` lets the stream wait
until all of the group got there, and what each wrote before is there after.

PyTorch's symmetric memory maps the buffers. NVLink multicast is never used.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hexiseq_triton.mapper import Mapper

_GRANULE = 32 << 20  # bytes; buffers grow in such steps
_BARRIER_CHANNEL = 0
_HOST = "host "
_log = logging.getLogger(__name__)


class PeerMemory:
    """The buffers of the ranks of one group, each in two parts; they grow as needed.

    Args:
        mapper: of the group.
        timeout: how long a barrier waits for the slowest rank before it stops the program.

    Attributes:
        out: byte at which the second part begins.
    """

    def __init__(self, mapper: Mapper, timeout: timedelta) -> None:
        self._mapper = mapper
        self._timeout_ms = int(timeout.total_seconds() * 1e3)
        self._buffer = torch.empty(0, dtype=torch.uint8, device=mapper.device)
        self._handle: Any = None
        self.out = 0

    def reserve(self, in_bytes: int, out_bytes: int = 0) -> None:
        """Have at least that much for each part; the same numbers on all ranks.

        What was there is lost where it is not enough. The second part begins at `out`.
        """
        if in_bytes <= self.out and out_bytes <= self._buffer.nbytes - self.out:
            return
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        if self._handle is not None:  # others may still read what is about to go
            torch.cuda.synchronize(self._mapper.device)
            dist.barrier(self._mapper.group)
        in_bytes = _rounded(max(in_bytes, self.out))
        out_bytes = _rounded(max(out_bytes, self._buffer.nbytes - self.out))
        self._handle = None
        self._buffer = self._buffer.new_empty(0)  # room for the next one
        self._buffer, self._handle = self._mapper.map((in_bytes + out_bytes,), torch.uint8)
        self.out = in_bytes

    def local(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a view of this rank's buffer from byte `offset` on."""
        num_bytes = _num_bytes(shape, dtype)
        return self._buffer[offset : offset + num_bytes].view(dtype).view(*shape)

    def remote(
        self, peer: int, offset: int, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a view of the buffer of the group's rank number `peer`."""
        view: torch.Tensor = self._handle.get_buffer(
            peer, tuple(shape), dtype, offset // dtype.itemsize
        )
        return view

    def distances(self) -> tuple[int, ...]:
        """Return, for each rank of the group, its buffer's address less that of this rank's."""
        own = self._handle.buffer_ptrs[self._handle.rank]
        return tuple(pointer - own for pointer in self._handle.buffer_ptrs)

    def barrier(self) -> None:
        """Let the current stream wait until those of all ranks are here."""
        self._handle.barrier(channel=_BARRIER_CHANNEL, timeout_ms=self._timeout_ms)


def open_peer_memory(
    mapper: Mapper, timeout: timedelta, what: str, obstacle: str = ""
) -> tuple[PeerMemory | None, str]:
    """Return the memory of a group, or None, and which path its transfers take.

    Args:
        mapper: of the group, whose ranks then decide alike.
        timeout: how long a barrier waits for the slowest rank.
        what: the transfers, for the log.
        obstacle: what else stands in this rank's way; "" for nothing.
    """
    answers = mapper.gather(obstacle or mapper.obstacle or _answer(mapper.device))
    obstacles = [answer for answer in answers if not answer.startswith(_HOST)]
    if not obstacles and len(set(answers)) > 1:
        obstacles = ["the group's ranks are on several hosts"]
    if not obstacles:
        memory = PeerMemory(mapper, timeout)
        obstacles = [answer for answer in mapper.gather(_tried(memory)) if answer]
        if not obstacles:
            return memory, "symmetric memory"
    path = f"NCCL: {obstacles[0]}"
    if dist.get_rank(mapper.group) == 0:
        _log.warning("%s of ranks with rank %d takes %s", what, dist.get_rank(), path)
    return None, path


def _tried(memory: PeerMemory) -> str:
    """Return what went wrong when ranks map each other's first buffers; "" for nothing."""
    try:
        memory.reserve(1)
        memory.barrier()
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def _answer(device: torch.device) -> str:
    """Return the host of a GPU that can take part, else what stands in the way."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "a GPU is older than Ampere"
    visible = range(torch.cuda.device_count())
    if not all(
        torch.cuda.can_device_access_peer(device.index, other)
        for other in visible
        if other != device.index
    ):
        return "GPUs of the host don't reach each other's memory"
    try:
        from torch.distributed import _symmetric_memory  # noqa: F401
    except ImportError:
        return "this PyTorch has no symmetric memory"
    return _HOST + socket.gethostname()


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // _GRANULE) * _GRANULE


def _num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    count = dtype.itemsize
    for size in shape:
        count *= size
    return count
