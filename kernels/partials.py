"""Partial sums that came from elsewhere, added to the rows they belong to, in a fixed order.

Partials lie in one buffer, the *pool*; any number of them may belong to the same rows. A *piece* is
a run of rows with the same partials, so each row is read once, gets its partials in their order in
float32 (float64 for float64), and is written once: the same sum on every run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from hexiseq_triton.kernels.options import state_dtype
from hexiseq_triton.segments import RowRange


class Piece(NamedTuple):
    """Rows [start, stop) get the pool's rows from each of `sources` on, in this order."""

    start: int
    stop: int
    sources: tuple[int, ...]


def pieces_of(partials: Iterable[tuple[Sequence[RowRange], int]]) -> tuple[Piece, ...]:
    """Return disjoint pieces, by row.

    Args:
        partials: of each, the rows that it belongs to, and its first row in the pool, where its
            rows stand one after the other. The order is that of the sums.
    """
    runs: list[tuple[int, int, int]] = []  # start, stop, where row 0 would stand in the pool
    begin_at: dict[int, list[int]] = defaultdict(list)
    for ranges, source in partials:
        for start, stop in ranges:
            begin_at[start].append(len(runs))
            runs.append((start, stop, source - start))
            source += stop - start
    edges = sorted({edge for run in runs for edge in run[:2]})
    pieces = []
    here: list[int] = []
    for start, stop in pairwise(edges):
        here = sorted([i for i in here if runs[i][1] > start] + begin_at[start])
        if here:
            pieces.append(Piece(start, stop, tuple(runs[i][2] + start for i in here)))
    return tuple(pieces)


def add_partials(
    total: torch.Tensor,
    pool: torch.Tensor,
    pieces: tuple[Piece, ...],
    out: torch.Tensor | None = None,
) -> None:
    """Add the partials to the rows of `total` that have some, in place or into `out`.

    Args:
        total: [T, ...] in the state dtype, contiguous.
        pool: [rows, ...] with the same rest, in any float dtype, contiguous.
        pieces: which rows get what.
        out: where the sums go, as `total`, in any float dtype; None is `total`. Other rows of it
            stay as they were.

    Raises:
        ValueError: if a tensor is not like that.
    """
    out = total if out is None else out
    for name, x in (("total", total), ("pool", pool), ("out", out)):
        if x.shape[1:] != total.shape[1:] or not x.is_contiguous():
            raise ValueError(
                f"{name} has shape {tuple(x.shape)} and strides {x.stride()}; "
                f"expected [rows, {', '.join(map(str, total.shape[1:]))}], contiguous"
            )
    if total.dtype != state_dtype(total.dtype) or out.shape != total.shape:
        raise ValueError(
            f"total is {total.dtype} {tuple(total.shape)}, out {tuple(out.shape)}; "
            "total must be float32 or float64, and out of its shape"
        )
    if total.device.type == "cuda" and total.dtype == torch.float32:
        from hexiseq_triton.kernels import add_partials as kernel  # needs Triton

        with torch.cuda.device(total.device):
            kernel.add_partials(total, pool, pieces, out)
        return
    for start, stop, sources in pieces:
        rows = total[start:stop].clone()
        for source in sources:
            rows += pool[source : source + stop - start]
        out[start:stop] = rows
