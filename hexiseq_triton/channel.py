"""Transfers between ranks: start them, do something else, wait for them.

Everything that moves between ranks moves through a `Channel`: both all-to-alls, the KV routes and
the returning partials. Sizes are known from the plan on both ends, so nothing is negotiated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from hexiseq_triton.errors import PeerError

Message = tuple[int, torch.Tensor]
"""The plan's number of the other rank, and a contiguous tensor."""


class Pending:
    """Transfers on their way. Received tensors hold data only after `wait`."""

    def __init__(self, works: Sequence[dist.Work], kept: Sequence[torch.Tensor], what: str) -> None:
        self._works = works
        self._kept = kept  # sent tensors must outlive the transfer
        self._what = what

    def wait(self) -> None:
        """Block (on CUDA: let the current stream wait) until everything has arrived.

        Raises:
            PeerError: if a peer stopped answering or the group's timeout passed.
        """
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise PeerError(f"{self._what} failed: {error}") from error
        self._works, self._kept = (), ()


class Channel:
    """A communicator among some ranks of the plan.

    Args:
        group: the process group; None where the channel has one rank.
        rank: this rank's number in the plan.
        world_ranks: the process that runs each rank of the plan.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, rank: int, world_ranks: Mapping[int, int]
    ) -> None:
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
        return Pending(works, [tensor for _, tensor in sends], what)
