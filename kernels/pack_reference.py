"""Pack and unpack in plain PyTorch: the definition. CPU tensors and float64 always use it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hexiseq_triton.kernels.options import state_dtype
from hexiseq_triton.kernels.pieces import Pieces
from hexiseq_triton.kernels.rotation import Rotation, turn


def pack(
    tensors: Sequence[torch.Tensor],
    away: torch.Tensor,
    own: torch.Tensor,
    pieces: Pieces,
    rotation: Rotation | None = None,
) -> None:
    """Write every piece to its places in the flat buffers, turned on the way.

    Args:
        tensors: what to pack, each [T, H, D] with its own H.
        away: the slots that will be sent, [slots, D], contiguous.
        own: the slots that stay, as `away`.
        pieces: which heads stand where.
        rotation: how the pieces that turn do so; None copies all.
    """
    for piece in pieces:
        heads = tensors[piece.tensor][:, slice(*piece.heads)]
        if rotation is not None and piece.turns:
            heads = turn(heads, rotation)
        for place in piece.places:
            place.view(own if place.own else away, *heads.shape[:2]).copy_(heads)


def unpack(
    away: torch.Tensor,
    own: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    pieces: Pieces,
    rotation: Rotation | None = None,
) -> None:
    """Write to every piece the sum of its places, turned back; rounded once, at the end.

    Args:
        away: the slots that arrived, [slots, D], contiguous.
        own: the slots that stayed, as `away`.
        tensors: where to, each [T, H, D] with its own H; their dtype may be another.
        pieces: which heads stand where; a piece's places are added in their order.
        rotation: what `pack` turned by; None copies all.
    """
    for piece in pieces:
        heads = tensors[piece.tensor][:, slice(*piece.heads)]
        blocks = [
            place.view(own if place.own else away, *heads.shape[:2]) for place in piece.places
        ]
        total = blocks[0].to(state_dtype(away.dtype))
        for block in blocks[1:]:
            total = total + block
        if rotation is not None and piece.turns:
            total = turn(total, rotation.inverse())
        heads.copy_(total)
