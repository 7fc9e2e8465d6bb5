"""Add partial sums to the rows they belong to, in one launch (see partials.py).

A program takes up to ROWS rows of a piece. Rows are contiguous on all sides, so it walks them as
one run of elements.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hexiseq_triton.kernels.partials import Piece

ROWS = 16
BLOCK = 4096
NUM_WARPS = 8
TILE_FIELDS = 4
_TILE_FIELDS = tl.constexpr(TILE_FIELDS)


@triton.jit(do_not_specialize=["row_size"])
def _add_kernel(total, pool, out, tiles, sources, row_size, BLOCK: tl.constexpr):
    tile = tiles + tl.program_id(0) * _TILE_FIELDS
    start = tl.load(tile) * row_size
    size = tl.load(tile + 1) * row_size
    first = tl.load(tile + 2)
    last = first + tl.load(tile + 3)
    for at in range(0, size, BLOCK):
        offsets = at + tl.arange(0, BLOCK)
        inside = offsets < size
        x = tl.load(total + start + offsets, mask=inside)
        for i in range(first, last):
            source = pool + tl.load(sources + i) * row_size
            x += tl.load(source + offsets, mask=inside).to(tl.float32)
        tl.store(out + start + offsets, x.to(out.dtype.element_ty), mask=inside)


class _Tables(NamedTuple):
    """`tiles` int64 [n, TILE_FIELDS]: row, rows, first entry in `sources`, entries there."""

    tiles: torch.Tensor
    sources: torch.Tensor


def add_partials(
    total: torch.Tensor, pool: torch.Tensor, pieces: tuple[Piece, ...], out: torch.Tensor
) -> None:
    """Write total + partials to `out`, as partials.add_partials checked them; total is float32."""
    row_size = total[0].numel() if len(total) else 0
    if not pieces or not row_size:
        return
    tables = _tables(pieces, total.device)
    _add_kernel[(len(tables.tiles),)](
        total, pool, out, *tables, row_size, BLOCK=BLOCK, num_warps=NUM_WARPS
    )


@lru_cache(maxsize=256)
def _tables(pieces: tuple[Piece, ...], device: torch.device) -> _Tables:
    tiles: list[list[int]] = []
    sources: list[int] = []
    for start, stop, firsts in pieces:
        for row in range(start, stop, ROWS):
            tiles.append([row, min(ROWS, stop - row), len(sources), len(firsts)])
            sources += [first + row - start for first in firsts]
    tables = [torch.tensor(x, dtype=torch.int64, device="cpu") for x in (tiles, sources)]
    if device.type == "cuda":
        # synchronous, once a layout: a cached table must be there for every stream
        return _Tables(*(x.to(device) for x in tables))
    return _Tables(*tables)
