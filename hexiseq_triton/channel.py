"""Transfers between ranks: start them, do something else, wait for them.

Everything that moves between ranks as messages moves through a `Channel`: both all-to-alls, the
KV routes and the returning partials. Sizes are known from the plan on both ends, so nothing is
negotiated.

On CUDA the transfers of a channel follow each other on a stream of its own. One begins when the
current stream has done what it was given before; within `issuing`, when some marks are passed, and
not later. Sent tensors are kept until the current stream has waited for their transfer, and so has
the stream they may have been made on: no memory needs to be recorded on streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from hexiseq_triton.errors import PeerError

Message = tuple[int, torch.Tensor]
"""The plan's number of the other rank, and a contiguous tensor."""

Mark = torch.cuda.Event | None
"""A point in what a stream does; None on a CPU, where all before is done."""

_HIGH_PRIORITY = -1


def wait_for(mark: Mark) -> None:
    """Let the current stream wait until a mark is passed."""
    if mark is not None:
        torch.cuda.current_stream().wait_event(mark)


class Pending:
    """Transfers on their way. Received tensors hold data only after `wait`."""

    def __init__(
        self,
        works: Sequence[dist.Work],
        kept: Sequence[torch.Tensor],
        what: str,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._works = works
        self._kept = kept  # sent tensors must outlive the transfer
        self._what = what
        self._stream = stream  # on which they were made, and which may reuse their memory

    def wait(self) -> None:
        """Block (on CUDA: let the current stream wait) until everything has arrived.

        Raises:
            PeerError: if a peer stopped answering or the group's timeout passed.
        """
        try:
            for work in self._works:
                work.wait()
                if self._stream is not None:
                    with torch.cuda.stream(self._stream):
                        work.wait()
        except RuntimeError as error:
            raise PeerError(f"{self._what} failed: {error}") from error
        self._works, self._kept = (), ()

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Let another stream wait until everything has arrived."""
        with torch.cuda.stream(stream):
            for work in self._works:
                work.wait()


class Lane:
    """A stream on which transfers follow each other; on a CPU all is done at once.

    Args:
        device: whose stream it is.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=_HIGH_PRIORITY)

    def mark(self) -> Mark:
        """Return the point up to which the current stream has been given work."""
        return None if self._stream is None else torch.cuda.current_stream().record_event()

    @contextmanager
    def issuing(self, *after: Mark) -> Iterator[None]:
        """Let what is started within begin once these marks are passed, and at once without."""
        if self._stream is None:
            yield
            return
        for mark in after:
            if mark is not None:
                self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream):
            yield


class Channel(Lane):
    """A communicator among some ranks of the plan.

    Args:
        group: the process group; None where the channel has one rank.
        rank: this rank's number in the plan.
        world_ranks: the process that runs each rank of the plan.
        device: this rank's device.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        rank: int,
        world_ranks: Mapping[int, int],
        device: torch.device,
    ) -> None:
        super().__init__(torch.device("cpu") if group is None else device)
        self.group = group
        self.rank = rank
        self._world_ranks = world_ranks

    def start(self, sends: Sequence[Message], receives: Sequence[Message], what: str) -> Pending:
        """Start one group of transfers; `what` names it in errors.

        Messages to oneself are copied; empty ones are dropped, on both ends alike. Between two
        ranks messages match in the order given.
        """
        own = [tensor for peer, tensor in sends if peer == self.rank]
        for target, source in zip(
            (tensor for peer, tensor in receives if peer == self.rank), own, strict=True
        ):
            target.copy_(source)

        operations = [
            dist.P2POp(call, tensor, self._world_ranks[peer], self.group)
            for call, messages in ((dist.isend, sends), (dist.irecv, receives))
            for peer, tensor in messages
            if peer != self.rank and tensor.numel()
        ]
        if not operations:  # batch_isend_irecv refuses an empty list
            return Pending((), (), what)
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise PeerError(f"{what} failed: {error}") from error
        kept = [tensor for _, tensor in sends]
        return Pending(works, kept, what, self._stream if self._is_issuing else None)

    @property
    def _is_issuing(self) -> bool:
        return self._stream is not None and torch.cuda.current_stream() == self._stream
