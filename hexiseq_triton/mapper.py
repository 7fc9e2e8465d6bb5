"""Buffers that the ranks of a group map at each other, by PyTorch's symmetric memory.

While ranks map, they tell each other about it under a number that PyTorch counts for the process
and not for the group (pytorch/pytorch issue 196082; harmless where that is mended). A rank that is
in fewer groups, or whose groups needed larger buffers less often, is at a lower number and would
wait for its peers for ever. So ranks first say how often each has mapped, and those behind catch up
with buffers that they share with nobody. What else a program maps with some of its ranks only is
not seen here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

_NO_ROOM = "no room"
_times = 0
"""How often this process has mapped, with whichever group."""
_failed = ""
"""Why mapping failed once: what number the process is at is unknown since then."""


class Mapper:
    """Maps buffers of one group.

    Args:
        group: ranks of one host whose GPUs reach each other's memory.
        device: this rank's GPU.
        gather: returns every rank's answer in the group.
        alone: returns a group of this rank only.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        gather: Callable[[str], Sequence[str]],
        alone: Callable[[], dist.ProcessGroup],
    ) -> None:
        self.group, self.device, self.gather = group, device, gather
        self._alone = alone

    @property
    def obstacle(self) -> str:
        """What stands in the way of mapping anything more; "" for nothing."""
        return _failed and f"mapping failed before: {_failed}"

    def map(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
        """Return this rank's buffer, and PyTorch's handle of all ranks'; a call of all of them.

        Raises:
            RuntimeError: the same on every rank, if one has no room; else what PyTorch says.
        """
        buffer, answer = self._allocated(shape, dtype)
        answers = self.gather(answer)
        for number, text in enumerate(answers):
            if text.startswith(_NO_ROOM):
                rank = dist.get_process_group_ranks(self.group)[number]
                raise RuntimeError(f"rank {rank} has {text}")
        for _ in range(max(map(int, answers)) - _times):
            self._rendezvous(_empty((1,), torch.uint8, self.device), self._alone())
        return buffer, self._rendezvous(buffer, self.group)

    def _allocated(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, str]:
        """Return a buffer, and what to tell the others."""
        try:
            return _empty(shape, dtype, self.device), str(_times)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            return torch.empty(0), f"{_NO_ROOM} for {tuple(shape)} {dtype} to share: {reason}"

    @staticmethod
    def _rendezvous(buffer: torch.Tensor, group: dist.ProcessGroup) -> Any:
        from torch.distributed import _symmetric_memory as symmetric_memory

        global _times, _failed
        try:
            handle = symmetric_memory.rendezvous(buffer, group)
        except RuntimeError as error:
            _failed = str(error).splitlines()[0]
            raise
        _times += 1
        return handle


def _empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    from torch.distributed import _symmetric_memory as symmetric_memory

    # an evaluation may be the first that needs so much, and what trains afterwards could not write
    # into an inference tensor
    with torch.inference_mode(False):
        found: torch.Tensor = symmetric_memory.empty(*shape, dtype=dtype, device=device)
    return found
