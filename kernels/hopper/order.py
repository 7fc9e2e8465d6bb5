"""In which order the programs of the backward take their key tiles.

A key tile reads q and do and adds to dq of all queries that see it: far more memory traffic than
its own keys. It stays in the L2 cache if the tiles at work share their queries. So tiles of a
document follow each other, heaviest first, one KV head after the other, and programs take the next
tile when they are done with one. Several heads take turns where the last tiles would else be too
few for all programs to end together.

The first round of tiles walks from the last query to the first, the next one back, and so on. In a
causal document the programs end a round of tiles one by one, a tile apart, and begin the next round
as far apart: all are near the same queries at any time.
"""

from __future__ import annotations

import numpy as np

from hexiseq_triton.kernels.options import Segments, with_rows
from hexiseq_triton.kernels.tilemap import SPAN_FIELDS, TILE_FIELDS

LATE = 0.01
"""Most time that one program may run alone at the end, as a share of the whole."""
ROUNDS = 3
"""Tiles for each program in the last turn of heads, if their heaviest would end later."""


def work_order(
    table: np.ndarray,
    num_tiles: int,
    segments: Segments,
    num_kv_heads: int,
    num_programs: int,
    block: int,
) -> np.ndarray:
    """Return the work items, int32 [num_tiles * num_kv_heads, 3]: tile, KV head, and 1 where the
    tile's queries are walked from the first to the last, 0 where from the last to the first.

    Args:
        table, num_tiles: the tile map, on the host.
        segments: the keys, as the map was made from.
        num_programs: how many take tiles.
        block: queries in a block.
    """
    tiles = table[: num_tiles * TILE_FIELDS].reshape(-1, TILE_FIELDS)
    spans = table[num_tiles * TILE_FIELDS :].reshape(-1, SPAN_FIELDS)
    blocks = np.concatenate([[0], np.cumsum(-(-spans[:, 1] // block))])
    cost = blocks[tiles[:, 5]] - blocks[tiles[:, 3]] + 1
    document = _documents(tiles[:, 0], segments)

    # tiles stand heaviest first: so do the documents, by their heaviest tile
    _, first, which = np.unique(document, return_index=True, return_inverse=True)
    last_tiles = document == document[first.max()]
    alone = cost[last_tiles].max()
    together = 1
    if alone > LATE * cost.sum() * num_kv_heads / num_programs:
        together = min(num_kv_heads, -(-ROUNDS * num_programs // int(last_tiles.sum())))
    tile = np.repeat(np.arange(num_tiles), num_kv_heads)
    head = np.tile(np.arange(num_kv_heads), num_tiles)
    order = np.lexsort((head, tile, head // together, first[which][tile]))
    tile, head = tile[order], head[order]
    # the rounds of all programs over one document and the heads that take turns in it
    starts = np.flatnonzero(np.diff([document[tile], head // together], prepend=-1, axis=1).any(0))
    rest = np.arange(tile.size) - np.repeat(starts, np.diff(starts, append=tile.size))
    found: np.ndarray = np.stack([tile, head, rest // num_programs % 2], 1).astype(np.int32)
    return found


def _documents(rows: np.ndarray, segments: Segments) -> np.ndarray:
    """Return the document of each of `rows`."""
    placed = sorted((row, segment.document) for segment, row in with_rows(segments))
    starts, documents = np.array(placed, dtype=np.int64).reshape(-1, 2).T
    found: np.ndarray = documents[np.searchsorted(starts, rows, side="right") - 1]
    return found
