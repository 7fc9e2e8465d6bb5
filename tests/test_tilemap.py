"""Tile maps against the visibility of single pairs."""

from __future__ import annotations

import random
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hexiseq_triton.kernels import kept
from hexiseq_triton.kernels.options import PlacedSegment, Segments, with_rows
from hexiseq_triton.kernels.tilemap import (
    SPAN_FIELDS,
    TILE_FIELDS,
    build_map,
    key_tiles,
    query_tiles,
)
from hexiseq_triton.segments import CAUSAL, Mask, Segment, num_tokens

segment_lists = st.lists(
    st.builds(
        lambda d, start, length: Segment(d, start, start + length),
        st.integers(0, 2),
        st.integers(0, 30),
        st.integers(0, 20),
    ),
    max_size=5,
)
sides = st.one_of(st.none(), st.integers(0, 15))
masks = st.builds(Mask, sides, sides)
blocks = st.sampled_from([1, 4, 7])


def visible(q: list[Segment], k: list[Segment], mask: Mask) -> np.ndarray:
    """Return how often each pair of rows may be summed: 1 where visible, else 0."""
    where_q = [(s.document, p) for s in q for p in range(s.start, s.stop)]
    where_k = [(s.document, p) for s in k for p in range(s.start, s.stop)]
    table = np.zeros((len(where_q), len(where_k)), int)
    for a, (document, i) in enumerate(where_q):
        for b, (other, j) in enumerate(where_k):
            left = mask.left is None or j >= i - mask.left
            right = mask.right is None or j <= i + mask.right
            table[a, b] = document == other and left and right
    return table


def split(table: np.ndarray, num_tiles: int) -> tuple[np.ndarray, np.ndarray]:
    border = num_tiles * TILE_FIELDS
    return table[:border].reshape(-1, TILE_FIELDS), table[border:].reshape(-1, SPAN_FIELDS)


def walked(q: Segments, k: Segments, mask: Mask, block_m: int, block_n: int) -> np.ndarray:
    """Return how often a kernel sums each pair of rows when it follows the map."""
    tiles, spans = split(*build_map(q, k, mask, block_m, block_n))
    shape = [max((row + s.num_tokens for s, row in with_rows(x)), default=0) for x in (q, k)]
    found = np.zeros(shape, int)
    for row, rows, position, full, edge, end in tiles[:, :6]:
        assert 0 < rows <= block_m
        for k_row, k_rows, _ in spans[full:edge]:
            assert k_rows % block_n == 0
            found[row : row + rows, k_row : k_row + k_rows] += 1
        for k_row, k_rows, k_position in spans[edge:end]:
            i = position + np.arange(rows)[:, None]
            j = k_position + np.arange(k_rows)[None, :]
            seen = np.ones((rows, k_rows), bool)
            if mask.left is not None:
                seen &= j >= i - mask.left
            if mask.right is not None:
                seen &= j <= i + mask.right
            found[row : row + rows, k_row : k_row + k_rows] += seen
    return found


@settings(deadline=None)  # the first example compiles
@given(segment_lists, segment_lists, masks, blocks, blocks)
def test_each_visible_pair_is_met_once_and_no_other(
    q: list[Segment], k: list[Segment], mask: Mask, block_m: int, block_n: int
) -> None:
    np.testing.assert_array_equal(walked(q, k, mask, block_m, block_n), visible(q, k, mask))


@settings(deadline=None)
@given(segment_lists, segment_lists, masks, st.randoms(use_true_random=False))
def test_placed_segments_are_met_where_they_stand(
    q: list[Segment], k: list[Segment], mask: Mask, random: random.Random
) -> None:
    first_rows = dict(enumerate(row for _, row in with_rows(k)))
    order = random.sample(range(len(k)), len(k))
    placed, rows, row = [], [], 0
    for i in order:
        row += random.randrange(3)
        placed.append(PlacedSegment(*k[i], row))
        rows += [(first_rows[i] + j, row + j) for j in range(k[i].num_tokens)]
        row += k[i].num_tokens
    expected = np.zeros((num_tokens(q), row), int)
    in_a_row = visible(q, k, mask)
    for stood, stands in rows:
        expected[:, stands] = in_a_row[:, stood]
    np.testing.assert_array_equal(walked(q, placed, mask, 4, 4), expected)
    swapped = Mask(mask.right, mask.left)
    np.testing.assert_array_equal(walked(placed, q, swapped, 4, 4), expected.T)


@settings(deadline=None)
@given(segment_lists, segment_lists, masks)
def test_swapping_the_sides_transposes_the_map(
    q: list[Segment], k: list[Segment], mask: Mask
) -> None:
    swapped = Mask(mask.right, mask.left)
    np.testing.assert_array_equal(walked(k, q, swapped, 4, 4).T, walked(q, k, mask, 4, 4))


@settings(deadline=None)
@given(segment_lists, segment_lists, masks)
def test_empty_tiles_are_left_out_or_kept(q: list[Segment], k: list[Segment], mask: Mask) -> None:
    tiles, _ = split(*build_map(q, k, mask, 4, 4))
    assert (tiles[:, 5] > tiles[:, 3]).all()
    all_tiles, _ = split(*build_map(q, k, mask, 4, 4, keep_empty=True))
    rows = [row for tile in all_tiles for row in range(tile[0], tile[0] + tile[1])]
    assert sorted(rows) == list(range(num_tokens(q)))


@settings(deadline=None)
@given(segment_lists, segment_lists, masks, st.booleans())
def test_a_tile_knows_what_it_begins_with(
    q: list[Segment], k: list[Segment], mask: Mask, keep_empty: bool
) -> None:
    tiles, spans = split(*build_map(q, k, mask, 4, 4, keep_empty=keep_empty))
    for _row, _rows, _position, full, edge, end, *known in tiles.tolist():
        edges, fulls = spans[edge:end].tolist(), spans[full:edge].tolist()
        first = [*edges, *fulls, None][0]
        if first is None:
            assert known[0] > 2**29  # no tensor has such a row
            assert known[1:3] == [0, 0]
        else:
            assert known[:3] == first
        assert known[4:] == [fulls[0][1] if fulls else 0, sum(rows for _, rows, _ in fulls)]
        if fulls:
            assert known[3] == fulls[0][0]


def test_tiles_stand_heaviest_first() -> None:
    tiles, _ = split(*build_map([Segment(0, 0, 1024)], [Segment(0, 0, 1024)], CAUSAL, 128, 128))
    assert tiles[:, 2].tolist() == list(range(896, -1, -128))
    keys, _ = split(
        *build_map([Segment(0, 0, 1024)], [Segment(0, 0, 1024)], Mask(0, None), 128, 64)
    )
    assert keys[:, 2].tolist() == list(range(0, 1024, 128))


def test_a_causal_diagonal_has_one_edge_block() -> None:
    tiles, spans = split(*build_map([Segment(0, 0, 512)], [Segment(0, 0, 512)], CAUSAL, 128, 128))
    heaviest = tiles[0]
    assert spans[heaviest[3] : heaviest[4]].tolist() == [[0, 384, 0]]
    assert spans[heaviest[4] : heaviest[5]].tolist() == [[384, 128, 384]]


def test_maps_are_cached() -> None:
    segments = [Segment(0, 0, 40)]
    cpu = torch.device("cpu")
    first = query_tiles(segments, segments, CAUSAL, 16, 16, cpu)
    assert query_tiles(tuple(segments), segments, CAUSAL, 16, 16, cpu) is first
    assert key_tiles(segments, segments, CAUSAL, 16, 16, cpu) is not first


def test_maps_are_forgotten_before_they_fill_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST_BYTES", 4096)
    cpu = torch.device("cpu")
    alive = []
    for length in range(200, 300):
        segments = (Segment(0, 0, length),)
        found = query_tiles(segments, segments, CAUSAL, 16, 16, cpu)
        assert query_tiles(segments, segments, CAUSAL, 16, 16, cpu) is found
        np.testing.assert_array_equal(
            found.on_host, build_map(segments, segments, CAUSAL, 16, 16)[0]
        )
        alive = [map_ for map_ in alive if map_() is not None] + [weakref.ref(found)]
        del found
        assert sum(map_().on_host.nbytes for map_ in alive if map_() is not None) <= 4096
