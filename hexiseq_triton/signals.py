"""Counters that ranks of one host set at each other, and streams that wait for them.

Whoever is ahead waits: a stream sets a peer's counter when it gets there, and a stream of the peer
goes on once the counter is as far. Neither takes a multiprocessor, so they work beside kernels that
hold all of them. Writes before a `send` are seen after the `wait` for it.

A stream waits for ever. So a thread looks after the waits and ends the process, as NCCL's does, if
none of them gets on for as long as the timeout.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from hexiseq_triton.mapper import Mapper

_LOOKS = 8
"""How often within the timeout the thread looks."""
_log = logging.getLogger(__name__)


class Count(IntEnum):
    """What is counted."""

    KEYS_READY = 0
    KEYS_TAKEN = 1
    PARTIALS_READY = 2
    PARTIALS_TAKEN = 3
    MEASURED = 4


_SAYS = {
    Count.KEYS_READY: "keys and values of rank {}",
    Count.KEYS_TAKEN: "rank {} to take keys and values",
    Count.PARTIALS_READY: "key and value gradients of rank {}",
    Count.PARTIALS_TAKEN: "rank {} to take key and value gradients",
    Count.MEASURED: "rank {} to be measured",
}


class Signals:
    """The counters of one group of ranks; made by all of them together.

    Args:
        mapper: of the group.
        names: what its ranks are called where a wait takes too long.
        timeout: how long a wait may take.

    Ranks are numbered as in the group. Counters begin at 0 and only grow.
    """

    def __init__(self, mapper: Mapper, names: Sequence[int], timeout: timedelta) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._rank = dist.get_rank(mapper.group)
        size = dist.get_world_size(mapper.group)
        self._counters, self._handle = mapper.map((len(Count), size), torch.int32)
        self._counters.zero_()
        torch.cuda.synchronize(mapper.device)
        dist.barrier(mapper.group)  # no peer counts before all counters are 0
        self._bases = self._handle.buffer_ptrs
        self._size = size
        self._names = names
        self._watch = Watch(timeout, mapper.device)

    def send(self, peer: int, what: Count, count: int) -> None:
        """Set this rank's counter at a peer when the current stream gets here."""
        stream = torch.cuda.current_stream().cuda_stream
        at = self._bases[peer] + self._offset(what, self._rank)
        self._check(self._driver.cuStreamWriteValue32(stream, at, count, 0))

    def wait(self, peer: int, what: Count, count: int) -> None:
        """Let the current stream wait until a peer's counter here is as far as `count`."""
        stream = torch.cuda.current_stream()
        at = self._bases[self._rank] + self._offset(what, peer)
        until = self._driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        self._check(self._driver.cuStreamWaitValue32(stream.cuda_stream, at, count, until))
        self._watch.add(stream.record_event(), _SAYS[what].format(self._names[peer]))

    def close(self) -> None:
        """Stop looking after waits."""
        self._watch.close()

    def _offset(self, what: Count, rank: int) -> int:
        return (what * self._size + rank) * torch.int32.itemsize

    def _check(self, result: tuple[Any, ...]) -> None:
        if result[0] != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"a stream does not take a counter: {result[0].name}")


class Watch:
    """Ends the process if marks are not passed in time.

    Args:
        timeout: how long the first mark that is not passed may stay the first.
        device: the GPU that the marks belong to, if they do.
    """

    def __init__(self, timeout: timedelta, device: torch.device | None = None) -> None:
        self._device = device
        self._seconds = timeout.total_seconds()
        self._marks: deque[tuple[Any, str, float]] = deque()
        self._closed = threading.Event()
        self._since = time.monotonic()
        threading.Thread(target=self._look, name="hexiseq signals", daemon=True).start()

    def add(self, mark: Any, what: str) -> None:
        """Look after one more mark, whose `query()` says whether it is passed."""
        self._marks.append((mark, what, time.monotonic()))

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def _look(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)  # threads begin on GPU 0
        while not self._closed.wait(min(1.0, self._seconds / _LOOKS)):
            late = self.late()
            if late is not None:
                _log.critical("timeout: waited %g s for %s; giving up", self._seconds, late)
                logging.shutdown()
                os._exit(1)

    def late(self) -> str | None:
        """Return what the first mark waits for if that takes too long."""
        while self._marks and self._marks[0][0].query():
            self._marks.popleft()
            self._since = time.monotonic()
        if not self._marks:
            return None
        _, what, added = self._marks[0]
        return what if time.monotonic() - max(added, self._since) > self._seconds else None


def counters_obstacle() -> str:
    """Return why streams here cannot wait for counters; "" if they can."""
    try:
        from cuda.bindings import driver  # noqa: F401
    except ImportError:
        return "the package cuda-bindings is missing"
    return ""
