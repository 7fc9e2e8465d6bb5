"""Which heads of which tensors stand where in the flat buffers of an all-to-all.

A *slot* holds one head of one token, D elements; a flat buffer is [slots, D]. There are two:
`away` for what moves between ranks, `own` for what stays. A *piece* is a run of heads of one
tensor [T, H, D], with every place where it stands. Packing reads the tensor and writes the places;
unpacking reads the places, adds them in order, and writes the tensor: one table serves both, for
any number of tokens, head dimension and dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

import torch

CHUNK_FIELDS = 6
PLACE_FIELDS = 3
MOST_HEADS = 4
"""Heads that one program moves at most: they share its cosines and sines. From bench_pack."""


class Place(NamedTuple):
    """Head i of token t stands in slot `start + t * row + i` of `own`, or else of `away`."""

    own: bool
    start: int
    row: int

    def view(self, buffer: torch.Tensor, num_tokens: int, num_heads: int) -> torch.Tensor:
        """Return the place in its buffer [slots, D], [num_tokens, num_heads, D]."""
        d = buffer.shape[1]
        size, stride = (num_tokens, num_heads, d), (self.row * d, d, 1)
        return buffer.as_strided(size, stride, buffer.storage_offset() + self.start * d)


class Piece(NamedTuple):
    """Heads [start, stop) of a launch's tensor number `tensor`; `turns` if a rotation applies."""

    tensor: int
    heads: tuple[int, int]
    turns: bool
    places: tuple[Place, ...]


class Tables(NamedTuple):
    """The pieces as the kernel reads them, int64 on its device.

    `chunks` [n, CHUNK_FIELDS]: tensor, first head, heads, turns, first row in `places`, rows there.
    `places` [m, PLACE_FIELDS]: own, start, row.
    """

    chunks: torch.Tensor
    places: torch.Tensor


class Pieces:
    """The pieces of one launch; their tables are made once for each device."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces = tuple(pieces)
        self._tables: dict[torch.device, Tables] = {}
        self._arriving: dict[torch.device, torch.cuda.Event] = {}
        self._num_slots: dict[int, tuple[int, int]] = {}

    def __iter__(self) -> Iterator[Piece]:
        return iter(self._pieces)

    @cached_property
    def num_heads(self) -> dict[int, int]:
        """The fewest heads that each tensor must have."""
        return {
            tensor: max(piece.heads[1] for piece in self if piece.tensor == tensor)
            for tensor in sorted({piece.tensor for piece in self})
        }

    def num_slots(self, num_tokens: int) -> tuple[int, int]:
        """Return the fewest slots that `away` and `own` must have."""
        if num_tokens not in self._num_slots:
            ends: list[list[int]] = [[0], [0]]
            for piece in self:
                width = piece.heads[1] - piece.heads[0]
                for own, start, row in piece.places:
                    ends[own].append(start + (num_tokens - 1) * row + width if num_tokens else 0)
            self._num_slots[num_tokens] = (max(ends[0]), max(ends[1]))
        return self._num_slots[num_tokens]

    def tables(self, device: torch.device) -> Tables:
        """Return the tables on `device`; the copy is asynchronous, and streams wait for it."""
        if device not in self._tables:
            chunks, places = self._rows()
            tables = Tables(_on(device, chunks, CHUNK_FIELDS), _on(device, places, PLACE_FIELDS))
            if device.type == "cuda":
                self._arriving[device] = torch.cuda.current_stream(device).record_event()
            self._tables[device] = tables
        elif arriving := self._arriving.get(device):
            self._await(arriving, device)
        return self._tables[device]

    def _await(self, arriving: torch.cuda.Event, device: torch.device) -> None:
        """Let the current stream wait for the copy, until it is known to be there."""
        if torch.cuda.is_current_stream_capturing():  # which begins when all copies are done
            return
        if arriving.query():
            self._arriving.pop(device, None)
        else:
            torch.cuda.current_stream(device).wait_event(arriving)

    def _rows(self) -> tuple[list[list[int]], list[list[int]]]:
        chunks: list[list[int]] = []
        places: list[list[int]] = []
        for tensor, (start, stop), turns, stands_at in self._pieces:
            for head in range(start, stop, MOST_HEADS):
                heads = min(MOST_HEADS, stop - head)
                chunks.append([tensor, head, heads, turns, len(places), len(stands_at)])
                places += [[own, at + head - start, row] for own, at, row in stands_at]
        return chunks, places


def _on(device: torch.device, rows: list[list[int]], fields: int) -> torch.Tensor:
    table = torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, fields)
    if device.type != "cuda":
        return table.to(device)
    return table.pin_memory().to(device, non_blocking=True)
