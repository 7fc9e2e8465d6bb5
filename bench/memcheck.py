"""A small run of every kernel, for compute-sanitizer: `make memcheck`.

    python bench/memcheck.py [HEAD_DIM ...]

Documents of odd lengths, so that blocks end inside tensors; both loaders (a view at an odd address
takes pointers); every form of the kernels; pack and unpack. Checks no results: the tests do.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from unittest.mock import patch

import torch

from hexiseq_triton.kernels import AttentionOptions, HeadMap
from hexiseq_triton.kernels.backward import attention_backward
from hexiseq_triton.kernels.delta import row_dots
from hexiseq_triton.kernels.forward import attention_forward
from hexiseq_triton.kernels.hopper import guard
from hexiseq_triton.kernels.pack import pack, unpack
from hexiseq_triton.kernels.pieces import Piece, Pieces, Place
from hexiseq_triton.kernels.rotation import Rotation
from hexiseq_triton.segments import CAUSAL, Mask, Segment, whole_documents

DEVICE = torch.device("cuda")
LENGTHS = (1, 129, 0, 200, 63)
HEAD_DIMS = (64, 72, 128, 256)
MARGIN = 128  # of 132 multiprocessors: each program walks several tiles
OPTIONS = (
    AttentionOptions(CAUSAL, 0.1),
    AttentionOptions(Mask(40, 0), 0.1, softcap=5.0),
)


def attend(head_dim: int, options: AttentionOptions, dtype: torch.dtype, offset: int) -> None:
    """Run forward in two launches, then backward, on views `offset` elements in."""
    rows = sum(LENGTHS)

    def tensor(heads: int) -> torch.Tensor:
        flat = torch.randn(offset + rows * heads * head_dim, device=DEVICE).to(dtype)
        return flat[offset:].view(rows, heads, head_dim)

    q, k, v, do = (tensor(heads) for heads in (4, 2, 2, 4))
    lse = torch.empty(4, rows, device=DEVICE)
    o, out = torch.empty(q.shape, device=DEVICE), torch.empty_like(q)
    documents = tuple(whole_documents(LENGTHS))
    half = (Segment(0, 0, 1), Segment(1, 0, 129))
    call = (HeadMap(0, 2), options)
    attention_forward(q, k[:130], v[:130], o, lse, documents, half, *call, first=True)
    rest = (Segment(3, 0, 200), Segment(4, 0, 63))
    attention_forward(
        q, k[130:], v[130:], o, lse, documents, rest, *call, out=out, sm_margin=MARGIN
    )
    delta = row_dots(do, out)
    for accumulate, deterministic in product((False, True), (False, True)):
        like = torch.float32 if accumulate else dtype
        grads = [torch.zeros(x.shape, device=DEVICE, dtype=like) for x in (q, k, v)]
        attention_backward(
            q, k, v, do, lse, delta, *grads, documents, documents, *call,
            accumulate=accumulate, deterministic=deterministic,
            sm_margin=MARGIN if accumulate else 0,
        )  # fmt: skip


def move(interleaved: bool) -> None:
    """Pack and unpack three heads, of which one stands in two places."""
    rows, head_dim = 67, 72
    x = torch.randn(rows, 3, head_dim, device=DEVICE).bfloat16()
    places = (Place(False, 0, 2),), (Place(True, 0, 1), Place(False, 2 * rows, 1))
    pieces = Pieces([Piece(0, (0, 2), True, places[0]), Piece(0, (2, 3), False, places[1])])
    away, own = (x.new_empty(slots, head_dim) for slots in (3 * rows, rows))
    angles = torch.rand(rows, 16, device=DEVICE)
    rotation = Rotation(angles.cos(), angles.sin(), interleaved)
    pack([x], away, own, pieces, rotation)
    unpack(away, own, [x], pieces, rotation)


def attend_in_all_forms(head_dims: Sequence[int]) -> None:
    """Run the kernels that the card takes, and the portable ones."""
    for head_dim in head_dims:
        for options in OPTIONS:
            attend(head_dim, options, torch.bfloat16, offset=0)
            with patch.object(guard, "runs", return_value=False):
                attend(head_dim, options, torch.bfloat16, offset=0)
        attend(head_dim, OPTIONS[0], torch.bfloat16, offset=1)
    for head_dim in head_dims:
        attend(head_dim, OPTIONS[0], torch.float32, offset=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("head_dims", nargs="*", type=int, help="others are left out")
    head_dims = parser.parse_args().head_dims or HEAD_DIMS
    attend_in_all_forms(head_dims)
    for interleaved in (False, True):
        move(interleaved)
    torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    main()
