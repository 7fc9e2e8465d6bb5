"""From segments to tiles: which blocks of keys each block of queries must visit.

A *tile* is up to `block` rows of one segment. A *span* is a run of rows on the other side that the
tile meets: *full* spans are whole blocks in which every pair is visible, so the kernel runs them
without a mask; *edge* spans hold the rest. Tiles stand heaviest first.

The map is one int32 array: tiles [num_tiles, TILE_FIELDS], then spans [num_spans, SPAN_FIELDS].

    tile   row, num_rows, position, first full span, first edge span, last edge span + 1,
           the same three numbers of the span that it begins with: an edge if it has one,
           row and num_rows of its first full span, num_rows of all of them
    span   row, num_rows, position

The last six fields save reading spans: most tiles have an edge and a full span. They are 0, and a
row past every tensor, where there is no such span.

With placed segments the rows of the other side may lie anywhere, as those of several chunks do.

A key at position j is seen by the queries at j - right ... j + left. So the map of key tiles and
query spans, which dK and dV need, is the same map with the sides of the mask swapped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
import torch

from hexiseq_triton.kernels.kept import count_table, kept
from hexiseq_triton.kernels.options import PlacedSegment, Segments
from hexiseq_triton.segments import Mask, Segment

TILE_FIELDS = 12
_WALKED = 6
_BEYOND = 1 << 30
"""A row past every tensor."""
SPAN_FIELDS = 3
_UNBOUNDED = 1 << 40  # farther than any two positions
_EDGE_COST = 1.25  # a masked block against a full one
_TILE_COST = 1.0  # what a tile costs besides its blocks


@dataclass(frozen=True)
class TileMap:
    """A tile map in device memory, and as it was made on the host."""

    table: torch.Tensor
    on_host: np.ndarray
    num_tiles: int
    ready: torch.cuda.Event | None
    stream: int

    def on_current_stream(self) -> TileMap:
        """Let the current stream wait until the map has arrived."""
        if self.ready is not None:
            current = torch.cuda.current_stream(self.table.device)
            if current.cuda_stream != self.stream:
                current.wait_event(self.ready)
        return self


def query_tiles(
    q_segments: Segments,
    kv_segments: Segments,
    mask: Mask,
    block_m: int,
    block_n: int,
    device: torch.device,
    *,
    keep_empty: bool = False,
) -> TileMap:
    """Return the map of query tiles of `block_m` rows and key spans in blocks of `block_n`.

    Tiles that see no key are left out, unless `keep_empty`: a launch that writes every row, and
    not just those it changes, needs them. Maps are cached by all arguments.
    """
    args = (tuple(q_segments), tuple(kv_segments), mask, block_m, block_n, keep_empty, device)
    return _cached_map(*args).on_current_stream()


def key_tiles(
    q_segments: Segments,
    kv_segments: Segments,
    mask: Mask,
    block_m: int,
    block_n: int,
    device: torch.device,
    *,
    keep_empty: bool = False,
) -> TileMap:
    """Return the map of key tiles of `block_n` rows and query spans in blocks of `block_m`."""
    swapped = Mask(mask.right, mask.left)
    args = (tuple(kv_segments), tuple(q_segments), swapped, block_n, block_m, keep_empty, device)
    return _cached_map(*args).on_current_stream()


@kept
def _cached_map(
    tile_segments: tuple[Segment, ...] | tuple[PlacedSegment, ...],
    span_segments: tuple[Segment, ...] | tuple[PlacedSegment, ...],
    mask: Mask,
    tile_block: int,
    span_block: int,
    keep_empty: bool,
    device: torch.device,
) -> TileMap:
    table, num_tiles = build_map(
        tile_segments, span_segments, mask, tile_block, span_block, keep_empty=keep_empty
    )
    count_table(table.nbytes)
    host = torch.from_numpy(table)
    if device.type != "cuda":
        return TileMap(host, table, num_tiles, None, 0)
    with torch.cuda.device(device):
        copy = host.pin_memory().to(device, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return TileMap(copy, table, num_tiles, ready, torch.cuda.current_stream().cuda_stream)


def build_map(
    tile_segments: Segments,
    span_segments: Segments,
    mask: Mask,
    tile_block: int,
    span_block: int,
    *,
    keep_empty: bool = False,
) -> tuple[np.ndarray, int]:
    """Return the map on the host, int32 [num_tiles * TILE_FIELDS + num_spans * SPAN_FIELDS],
    and num_tiles; the row i of a tile sees the rows i - mask.left ... i + mask.right of a span."""
    left = _UNBOUNDED if mask.left is None else mask.left
    right = _UNBOUNDED if mask.right is None else mask.right
    spanned = _as_array(span_segments)
    by_document = np.argsort(spanned[:, 0], kind="stable")
    tiles, spans, cost = _walk(
        _as_array(tile_segments), spanned[by_document],
        left, right, tile_block, span_block, keep_empty,
    )  # fmt: skip
    heaviest_first = np.argsort(-cost, kind="stable")
    tiles = _with_first_spans(tiles[heaviest_first], spans)
    return np.concatenate([tiles.ravel(), spans.ravel()]), len(tiles)


def _with_first_spans(tiles: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """Return the tiles with their last six fields."""
    full_begin, edge_begin, edge_end = tiles[:, 3:].T
    none = np.array([[_BEYOND, 0, 0]], np.int32)
    spans = np.concatenate([spans, none])
    first = np.where(edge_begin < edge_end, edge_begin, full_begin)
    first = np.where(full_begin < edge_end, first, len(spans) - 1)
    first_full = np.where(full_begin < edge_begin, full_begin, len(spans) - 1)
    rows = np.concatenate([[0], np.cumsum(spans[:, 1], dtype=np.int64)])
    full_rows = rows[edge_begin] - rows[full_begin]
    added = [tiles, spans[first], spans[first_full, :2], full_rows.astype(np.int32)[:, None]]
    return np.concatenate(added, axis=1)


def _as_array(segments: Segments) -> np.ndarray:
    """Return document, start, stop and first row of each segment, int64 [num_segments, 4]."""
    flat = [number for segment in segments for number in segment]
    if segments and len(segments[0]) == 4:
        return np.array(flat, dtype=np.int64).reshape(-1, 4)
    table = np.array(flat, dtype=np.int64).reshape(-1, 3)
    lengths = table[:, 2] - table[:, 1]
    return np.column_stack([table, np.cumsum(lengths) - lengths])


@numba.njit(cache=True, nogil=True)
def _walk(tile_segments, span_segments, left, right, tile_block, span_block, keep_empty):
    """Return tiles, spans and the cost of each tile; `span_segments` is sorted by document."""
    num_tiles, num_spans = 0, 0
    for s in range(len(tile_segments)):
        document, start, stop, _ = tile_segments[s]
        here = -(-(stop - start) // tile_block)
        first = np.searchsorted(span_segments[:, 0], document)
        last = np.searchsorted(span_segments[:, 0], document, side="right")
        num_tiles += here
        num_spans += 3 * here * (last - first)  # an edge, full blocks, an edge
    tiles = np.empty((num_tiles, _WALKED), np.int32)
    spans = np.empty((num_spans, SPAN_FIELDS), np.int32)
    cost = np.empty(num_tiles, np.float64)

    tile, span = 0, 0
    for s in range(len(tile_segments)):
        document, start, stop, tile_row = tile_segments[s]
        first = np.searchsorted(span_segments[:, 0], document)
        last = np.searchsorted(span_segments[:, 0], document, side="right")
        for low in range(start, stop, tile_block):
            high = min(low + tile_block, stop)
            full_begin, num_full, num_edge = span, 0, 0
            for t in range(first, last):
                _, k_start, k_stop, k_row = span_segments[t]
                _, begin, end, _ = _visible_range(
                    low, high, k_start, k_stop, left, right, span_block
                )
                if begin < end:
                    spans[span] = k_row + begin - k_start, end - begin, begin
                    span += 1
                    num_full += (end - begin) // span_block
            edge_begin = span
            for t in range(first, last):
                _, k_start, k_stop, k_row = span_segments[t]
                any_begin, begin, end, any_end = _visible_range(
                    low, high, k_start, k_stop, left, right, span_block
                )
                for a, b in ((any_begin, begin), (end, any_end)):
                    if a < b:
                        spans[span] = k_row + a - k_start, b - a, a
                        span += 1
                        num_edge += -(-(b - a) // span_block)
            if keep_empty or span > full_begin:
                tiles[tile] = (
                    tile_row + low - start, high - low, low, full_begin, edge_begin, span
                )  # fmt: skip
                cost[tile] = _TILE_COST + num_full + _EDGE_COST * num_edge
                tile += 1
    return tiles[:tile], spans[:span], cost[:tile]


@numba.njit(cache=True, nogil=True)
def _visible_range(low, high, k_start, k_stop, left, right, block):
    """Return four positions: [1st, 4th) is visible to some row of [low, high), [2nd, 3rd) is whole
    blocks visible to all rows."""
    any_begin = max(k_start, low - left)
    any_end = min(k_stop, high + right)
    if any_begin >= any_end:
        return 0, 0, 0, 0
    begin = max(k_start, high - 1 - left)
    begin = any_begin + -(-(begin - any_begin) // block) * block  # the edge before it: whole blocks
    end = min(k_stop, low + right + 1)
    num_blocks = (end - begin) // block if end > begin else 0
    if num_blocks == 0:  # one edge, and not two
        return any_begin, any_begin, any_begin, any_end
    return any_begin, begin, begin + num_blocks * block, any_end
