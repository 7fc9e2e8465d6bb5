"""Links as slow as one likes: a transfer is over no sooner than such a link would be done with it.

On CUDA a kernel that only waits follows each transfer on a stream of its own, so computing goes on
meanwhile, as it would beside a slow link. On a CPU `wait` sleeps for what is left of the time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from hexiseq_triton.channel import Channel, Message, Pending
from hexiseq_triton.context import ParallelContext


def delay_links(context: ParallelContext, gb_per_s: float) -> None:
    """Let all that this rank receives inside attention pass a link of `gb_per_s` (10^9 bytes/s)."""
    link = _Link(gb_per_s * 1e9, context.device)
    context.send_messages()  # only they can be delayed
    heads, routes = context.heads, context.routes
    context.heads = DelayedChannel(heads, link)
    context.routes = context.heads if routes is heads else DelayedChannel(routes, link)


class DelayedChannel(Channel):
    """A channel whose transfers take as long as its link needs; transfers of a link queue up."""

    def __init__(self, channel: Channel, link: _Link) -> None:
        self.__dict__.update(vars(channel))
        self._link = link

    def start(self, sends: Sequence[Message], receives: Sequence[Message], what: str) -> Pending:
        """Start the transfers; see `Channel.start`."""
        pending = super().start(sends, receives, what)
        num_bytes = sum(tensor.nbytes for peer, tensor in receives if peer != self.rank)
        if not num_bytes:
            return pending
        return _DelayedPending(pending, self._link.passed(num_bytes, pending))


class _DelayedPending(Pending):
    """Transfers that have arrived only when the link is done with them, too."""

    def __init__(self, inner: Pending, done: torch.cuda.Event | float) -> None:
        self._inner = inner
        self._done = done

    def wait(self) -> None:
        """See `Pending.wait`."""
        self._inner.wait()
        if isinstance(self._done, float):
            time.sleep(max(0.0, self._done - time.monotonic()))
        else:
            torch.cuda.current_stream().wait_event(self._done)


class _Link:
    """One rank's link, and until when it is busy."""

    def __init__(self, bytes_per_s: float, device: torch.device) -> None:
        self._bytes_per_s = bytes_per_s
        self._busy_until = 0.0
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._cycles_per_s = _cycles_per_s(self._stream)

    def passed(self, num_bytes: int, pending: Pending) -> torch.cuda.Event | float:
        """Return when `num_bytes` have passed, after all before them.

        On CUDA they begin when they have arrived over the true link: both ends are there then.
        """
        seconds = num_bytes / self._bytes_per_s
        if self._stream is None:
            self._busy_until = max(self._busy_until, time.monotonic()) + seconds
            return self._busy_until
        pending.hold(self._stream)
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(int(seconds * self._cycles_per_s))
            done: torch.cuda.Event = self._stream.record_event()
            return done


def _cycles_per_s(stream: torch.cuda.Stream) -> float:
    """Return how many cycles of `torch.cuda._sleep` make a second."""
    cycles = 20_000_000
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)  # the clock rises first
        start.record()
        torch.cuda._sleep(cycles)
        stop.record()
    stop.synchronize()
    return cycles / (float(start.elapsed_time(stop)) / 1e3)
