"""How a kernel is cut and launched on one kind of card."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Config:
    """Rows of queries and keys in a block, warps and pipeline stages of a program.

    With `programs_per_sm` the grid is persistent: so many programs stay on each multiprocessor and
    walk the work items. 0 launches one program for each item, unless some multiprocessors are to
    stay free. `descriptors` loads blocks with the copy engine where strides allow it.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    descriptors: bool = False
    programs_per_sm: int = 0

    def num_programs(self, num_items: int, device: torch.device, sm_margin: int) -> int:
        """Return the size of the grid."""
        if device.type != "cuda":
            return min(num_items, 3)  # the interpreter: a few programs, several items each
        if not self.programs_per_sm and not sm_margin:
            return num_items
        free = max(1, num_sms(device) - sm_margin)
        return min(num_items, free * max(1, self.programs_per_sm))


Entries = dict[tuple[str, int], Config]


class Table(Entries):
    """The launch choices of one kernel, by architecture and padded head dimension.

    `alone` has those for one program on each multiprocessor, where they differ: it needs more warps
    than one of several programs, and has fewer registers to spare across its loop over work items.
    """

    def __init__(self, name: str, entries: Entries, alone: Entries) -> None:
        super().__init__(entries)
        self.name = name
        self.alone = alone


@cache
def num_sms(device: torch.device) -> int:
    """Return how many multiprocessors the card has."""
    return torch.cuda.get_device_properties(device).multi_processor_count
