"""Pack what a rank sends in one launch, and unpack what it gets back, turned on the way.

Heads of [T, H, D] tensors move to or from slots of two flat buffers (see pieces.py), optionally by
way of a rotation (see rotation.py) computed in float32. Packing reads each element once and writes
it to every place; unpacking reads every place once, adds in order, and rounds once.

A program moves ROWS tokens of one chunk, at most MOST_HEADS heads, whose cosines and sines it
loads once. Neighbouring programs work on the same tokens, so that rows of memory stay together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

from hexiseq_triton.kernels.forms import Form, forms
from hexiseq_triton.kernels.kept import MOST_KEPT
from hexiseq_triton.kernels.pack_checks import (
    MOST_TENSORS,
    Turned,
    check_buffer,
    check_rotation,
    check_tensors,
)
from hexiseq_triton.kernels.pieces import CHUNK_FIELDS, PLACE_FIELDS, Pieces
from hexiseq_triton.kernels.prepared import Prepared
from hexiseq_triton.kernels.rotation import Rotation

NUM_TENSORS = MOST_TENSORS + 6  # and away, own, cos, sin, chunks, places
# of 14 choices the one whose worst case is best in bench_pack on an H100
BLOCK_BYTES = 16384  # of one head that a program holds at once, over its rows
NUM_WARPS = 8

_CHUNK_FIELDS = tl.constexpr(CHUNK_FIELDS)
_PLACE_FIELDS = tl.constexpr(PLACE_FIELDS)


@triton.jit
def _slots(ends, i, D: tl.constexpr):
    """Return where this head's slots begin in place number i, [ROWS]."""
    _, away, own, places, _, head, row = ends
    place = places + i * _PLACE_FIELDS
    buffer = tl.where(tl.load(place) != 0, own, away)
    return buffer + (tl.load(place + 1) + row * tl.load(place + 2) + head) * D


@triton.jit
def _read(ends, columns, mask, D: tl.constexpr, UNPACK: tl.constexpr):
    """Return columns of one head in float32: the tensor's, or the sum of all places'."""
    if UNPACK:
        x = tl.load(_slots(ends, 0, D)[:, None] + columns, mask=mask).to(tl.float32)
        for i in range(1, ends[4]):
            x += tl.load(_slots(ends, i, D)[:, None] + columns, mask=mask).to(tl.float32)
    else:
        x = tl.load(ends[0][:, None] + columns, mask=mask).to(tl.float32)
    return x


@triton.jit
def _write(x, ends, columns, mask, D: tl.constexpr, UNPACK: tl.constexpr):
    """Store columns of one head: to the tensor, or to every place."""
    if UNPACK:
        tl.store(ends[0][:, None] + columns, x.to(ends[0].dtype.element_ty), mask=mask)
    else:
        x = x.to(ends[1].dtype.element_ty)
        for i in range(ends[4]):
            tl.store(_slots(ends, i, D)[:, None] + columns, x, mask=mask)


@triton.jit
def _columns(inside, D: tl.constexpr, FIRST: tl.constexpr, PAD: tl.constexpr):
    """Return columns [FIRST, D), [1, PAD], and which elements exist, [ROWS, PAD]."""
    columns = FIRST + tl.arange(0, PAD)[None, :]
    return columns, inside[:, None] & (columns < D)


@triton.jit
def _turn_halves(
    ends, inside, cos, sin,
    D: tl.constexpr, HALF: tl.constexpr, PAD: tl.constexpr, UNPACK: tl.constexpr,
):  # fmt: skip
    """Move columns [0, 2 HALF) of one head; column i turns with column i + HALF."""
    columns = tl.arange(0, PAD)[None, :]
    mask = inside[:, None] & (columns < HALF)
    a = _read(ends, columns, mask, D, UNPACK)
    b = _read(ends, columns + HALF, mask, D, UNPACK)
    _write(a * cos - b * sin, ends, columns, mask, D, UNPACK)
    _write(b * cos + a * sin, ends, columns + HALF, mask, D, UNPACK)


@triton.jit
def _turn_pairs(
    ends, inside, cos, sin,
    D: tl.constexpr, HALF: tl.constexpr, PAD: tl.constexpr, UNPACK: tl.constexpr,
):  # fmt: skip
    """Move columns [0, 2 HALF) of one head; column 2 i turns with column 2 i + 1."""
    columns = tl.arange(0, 2 * PAD)[None, :]
    mask = inside[:, None] & (columns < 2 * HALF)
    pairs = _read(ends, columns, mask, D, UNPACK).reshape(inside.shape[0], PAD, 2)
    a, b = tl.split(pairs)
    turned = tl.join(a * cos - b * sin, b * cos + a * sin).reshape(inside.shape[0], 2 * PAD)
    _write(turned, ends, columns, mask, D, UNPACK)


@triton.jit
def _angles(table, row, inside, stride_row, stride_column, HALF: tl.constexpr, PAD: tl.constexpr):
    """Return cosines or sines of the program's tokens in float32, [ROWS, PAD]."""
    columns = tl.arange(0, PAD)[None, :]
    at = (table + row * stride_row)[:, None] + columns * stride_column
    return tl.load(at, mask=inside[:, None] & (columns < HALF)).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows", "num_chunks"])
def _move_kernel(
    x0, x1, x2, away, own, cos, sin, chunks, places,
    num_rows, num_chunks,
    stride_0t, stride_0h, stride_1t, stride_1h, stride_2t, stride_2h,
    stride_cost, stride_cosd, stride_sint, stride_sind,
    UNPACK: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
    PAD: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr,
):  # fmt: skip
    UNROLL: tl.constexpr = 2 if UNPACK else 1  # a few % either way, see docs/kernel-log.md
    chunk = chunks + tl.program_id(0) % num_chunks * _CHUNK_FIELDS
    row = (tl.program_id(0) // num_chunks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    tensor = tl.load(chunk)
    first_head = tl.load(chunk + 1)
    num_heads = tl.load(chunk + 2)
    turns = tl.load(chunk + 3)
    places += tl.load(chunk + 4) * _PLACE_FIELDS
    num_places = tl.load(chunk + 5)

    x = tl.where(tensor == 0, x0, tl.where(tensor == 1, x1, x2))
    stride_t = tl.where(tensor == 0, stride_0t, tl.where(tensor == 1, stride_1t, stride_2t))
    stride_h = tl.where(tensor == 0, stride_0h, tl.where(tensor == 1, stride_1h, stride_2h))
    lines = x + first_head * stride_h + row * stride_t

    if HALF == 0:
        turns = 0
    if turns == 0:
        for head in tl.range(num_heads, loop_unroll_factor=UNROLL):
            ends = (lines + head * stride_h, away, own, places, num_places, head, row)
            columns, mask = _columns(inside, D, 0, PAD)
            _write(_read(ends, columns, mask, D, UNPACK), ends, columns, mask, D, UNPACK)
    else:
        # [ROWS, HALF_PAD]
        c = _angles(cos, row, inside, stride_cost, stride_cosd, HALF, HALF_PAD)
        s = _angles(sin, row, inside, stride_sint, stride_sind, HALF, HALF_PAD)
        if UNPACK:
            s = -s
        for head in tl.range(num_heads, loop_unroll_factor=UNROLL):
            ends = (lines + head * stride_h, away, own, places, num_places, head, row)
            if 2 * HALF < D:  # read before anything is written: the loads then run side by side
                columns, mask = _columns(inside, D, 2 * HALF, REST_PAD)
                rest = _read(ends, columns, mask, D, UNPACK)
            if INTERLEAVED:
                _turn_pairs(ends, inside, c, s, D, HALF, HALF_PAD, UNPACK)
            else:
                _turn_halves(ends, inside, c, s, D, HALF, HALF_PAD, UNPACK)
            if 2 * HALF < D:
                _write(rest, ends, columns, mask, D, UNPACK)


def pack(
    tensors: Sequence[torch.Tensor],
    away: torch.Tensor,
    own: torch.Tensor,
    pieces: Pieces,
    rotation: Rotation | None = None,
) -> None:
    """Write every piece to its places in the flat buffers, turned on the way.

    Args:
        tensors: what to pack, at most three, each [T, H, D] bf16, fp16 or fp32 with its own H;
            the last stride is 1, D a multiple of 8 up to 256.
        away: the slots that will be sent, [slots, D], contiguous; of these dtypes, maybe another.
        own: the slots that stay, as `away`.
        pieces: which heads stand where.
        rotation: how the pieces that turn do so; None copies all.

    Raises:
        ValueError: if a tensor is not like that.
    """
    _launch(tensors, away, own, pieces, rotation, unpacks=False)


def unpack(
    away: torch.Tensor,
    own: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    pieces: Pieces,
    rotation: Rotation | None = None,
) -> None:
    """Write to every piece the sum of its places, turned back; rounded once, at the end.

    Args:
        away: the slots that arrived, [slots, D] bf16, fp16 or fp32, contiguous.
        own: the slots that stayed, as `away`.
        tensors: where to, at most three, as in `pack`; their dtype may differ from the slots'.
        pieces: which heads stand where; a piece's places are added in their order.
        rotation: what `pack` turned by; None copies all.

    Raises:
        ValueError: if a tensor is not like that.
    """
    _launch(tensors, away, own, pieces, rotation, unpacks=True)


def _launch(
    tensors: Sequence[torch.Tensor],
    away: torch.Tensor,
    own: torch.Tensor,
    pieces: Pieces,
    rotation: Rotation | None,
    *,
    unpacks: bool,
) -> None:
    turned = None if rotation is None else Turned.of(rotation)
    keys = tuple(forms(tensors)), *forms((away, own))
    launch = _prepare(*keys, pieces, turned, unpacks)
    if launch is not None:
        padding = [tensors[0]] * (MOST_TENSORS - len(tensors))
        angles = (away, away) if rotation is None else (rotation.cos, rotation.sin)
        launch(*tensors, *padding, away, own, *angles, *pieces.tables(away.device))


@lru_cache(maxsize=MOST_KEPT)
def _prepare(
    tensors: tuple[Form, ...],
    away: Form,
    own: Form,
    pieces: Pieces,
    turned: Turned | None,
    unpacks: bool,
) -> Prepared | None:
    """Check everything and return the launch; None where there is nothing to do."""
    check_tensors(tensors, pieces)
    num_tokens, _, head_dim = tensors[0].shape
    buffers = (("away", away), ("own", own))
    for (name, buffer), slots in zip(buffers, pieces.num_slots(num_tokens), strict=True):
        check_buffer(name, buffer, slots, away.dtype, tensors[0])
    if turned is not None:
        check_rotation(turned, tensors[0])
    num_chunks = len(pieces.tables(away.device).chunks)
    if not num_tokens or not num_chunks:
        return None

    half = turned.cos.shape[1] if turned else 0
    cos, sin = (turned.cos, turned.sin) if turned else (away, away)
    padded = triton.next_power_of_2(head_dim)
    rows = BLOCK_BYTES // (padded * max(tensors[0].dtype.itemsize, away.dtype.itemsize))
    three = (*tensors, *[tensors[0]] * (MOST_TENSORS - len(tensors)))
    scalars = (
        num_tokens,
        num_chunks,
        *(stride for x in three for stride in x.row_strides),
        *cos.strides,
        *sin.strides,
    )
    constants = {
        "UNPACK": unpacks,
        "INTERLEAVED": turned is not None and turned.interleaved,
        "ROWS": rows,
        "D": head_dim,
        "PAD": padded,
        "HALF": half,
        "HALF_PAD": triton.next_power_of_2(max(1, half)),
        "REST_PAD": triton.next_power_of_2(max(1, head_dim - 2 * half)),
        "num_warps": NUM_WARPS,
    }
    grid = (triton.cdiv(num_tokens, rows) * num_chunks,)
    return Prepared(_move_kernel, grid, scalars, constants, blocks=[None] * NUM_TENSORS)
