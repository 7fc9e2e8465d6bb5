"""The ragged all-to-all inside a head-parallel group: tokens to heads, and heads to tokens.

A rank holds s_d tokens of all heads, and afterwards its heads of all L_g tokens. One launch packs
all that it sends, turned by RoPE on the way; the blocks it receives stand one after the other and
already are the result. On the way back the rows for each rank are contiguous, and one launch
unpacks: it joins the heads, adds the replicas of KV heads in rank order, and turns gradients back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import NamedTuple

import torch

from hexiseq_triton.channel import Channel, Message, Pending
from hexiseq_triton.group_slots import Block, GroupSlots, group_slots, members_of
from hexiseq_triton.kernels import pack_reference, state_dtype
from hexiseq_triton.kernels.attention import by_reference
from hexiseq_triton.kernels.options import unit_last_stride
from hexiseq_triton.kernels.rotation import Rotation
from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.planner.heads import HeadRange

KV = dict[HeadRange, torch.Tensor]
"""For each atomic interval of KV heads, keys and values [L_g, 2, heads, D]."""


class HeadInputs(NamedTuple):
    """What a rank attends with; the tensors hold data only after their `wait`."""

    q: torch.Tensor
    kv: KV
    q_pending: Pending
    kv_pending: Pending


class HeadExchange:
    """The all-to-alls of one rank under one layout.

    Args:
        channel: the ranks of the group.
        layout: who holds what.
    """

    def __init__(self, channel: Channel, layout: BatchLayout) -> None:
        self._channel = channel
        self._members = members_of(layout)
        self._rank = layout.rank
        self._num_q_heads = layout.share.num_q_heads
        self._tokens = layout.num_tokens
        self._group_tokens = layout.group_rows[-1][1]

    def start_inputs(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotation: Rotation | None
    ) -> HeadInputs:
        """Start moving q [s_d, H, D], k and v [s_d, H_kv, D] to the ranks of their heads.

        Keys and values leave first. With `rotation` q and k arrive turned.
        """
        q_stays = self._stays(rotation)
        slots = self._slots(kv=True, q=not q_stays)
        away, own = _pack((k, v) if q_stays else (k, v, q), slots, rotation)
        kv = self._kv_parts(own, slots)
        kv_pending = self._channel.start(
            _blocks(away, slots.kv_away),
            self._rows_of_others(kv.values()),
            "the all-to-all of keys and values",
        )
        if q_stays:
            return HeadInputs(unit_last_stride(q), kv, Pending((), (), "queries"), kv_pending)
        q_heads, q_pending = self._start_queries(away, own, slots, "queries")
        return HeadInputs(q_heads, kv, q_pending, kv_pending)

    def start_like_queries(self, x: torch.Tensor, what: str) -> tuple[torch.Tensor, Pending]:
        """Start moving x [s_d, H, D] to [L_g, h_d, D], this rank's query heads of all tokens."""
        if self._stays(None):
            return unit_last_stride(x), Pending((), (), what)
        slots = self._slots(q=True)
        return self._start_queries(*_pack((x,), slots, None), slots, what)

    def to_tokens(
        self, x: torch.Tensor, what: str, rotation: Rotation | None = None
    ) -> torch.Tensor:
        """Move x [L_g, h_d, D] back to [s_d, H, D], all heads of this rank's tokens.

        With `rotation` x is a gradient of what that turned, and arrives turned back.
        """
        if self._stays(rotation):
            return x
        slots = self._slots(q=True)
        away = x.new_empty(slots.num_away, x.shape[-1])
        self._channel.start(
            self._rows_of_others([x]), _blocks(away, slots.q_away), f"the all-to-all of {what}"
        ).wait()
        num_heads = max(member.q_heads[1] for member in self._members)
        tokens = x.new_empty(self._tokens, num_heads, x.shape[-1])
        _movers(x).unpack(away, _flat(x), (tokens,), slots.pieces, rotation)
        return tokens

    def kv_gradient_room(self, like: torch.Tensor) -> tuple[torch.Tensor, KV]:
        """Return slots for this rank's dK and dV in the state dtype, and the parts as views."""
        slots = self._slots(kv=True)
        own = like.new_empty(slots.num_own, like.shape[-1], dtype=state_dtype(like.dtype))
        return own, self._kv_parts(own, slots)

    def kv_gradients_to_tokens(
        self, own: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, rotation: Rotation | None
    ) -> None:
        """Move what `kv_gradient_room` holds to its tokens' owners, into dk and dv [s_d, H_kv, D].

        Replicas of a KV head are added in the group's rank order, so the sum is the same in every
        run; dk is turned back.
        """
        slots = self._slots(kv=True)
        away = own.new_empty(slots.num_away, own.shape[-1])
        self._channel.start(
            self._rows_of_others(self._kv_parts(own, slots).values()),
            _blocks(away, slots.kv_away),
            "the all-to-all of key and value gradients",
        ).wait()
        _movers(away).unpack(away, own, (dk, dv), slots.pieces, rotation)

    # ---------------------------------------------------------------- the two buffers

    def _stays(self, rotation: Rotation | None) -> bool:
        """Return whether queries need no move at all: a group of one, and nothing to turn."""
        return len(self._members) == 1 and rotation is None

    def _kv_parts(self, own: torch.Tensor, slots: GroupSlots) -> KV:
        """Return the part [L_g, 2, heads, D] of each interval of KV heads."""
        return {
            (start, stop): own[slice(*held)].view(
                self._group_tokens, 2, stop - start, own.shape[-1]
            )
            for (start, stop), held in slots.kv_own.items()
        }

    def _slots(self, *, kv: bool = False, q: bool = False) -> GroupSlots:
        return group_slots(self._members, self._rank, kv=kv, q=q)

    def _rows_of_others(self, tensors: Iterable[torch.Tensor]) -> list[Message]:
        """Return each other rank's rows of `tensors`, which hold all rows of some heads."""
        kept = list(tensors)
        return [
            (member.rank, tensor[slice(*member.rows)])
            for member in self._members
            if member.rank != self._rank
            for tensor in kept
        ]

    def _start_queries(
        self, away: torch.Tensor, own: torch.Tensor, slots: GroupSlots, what: str
    ) -> tuple[torch.Tensor, Pending]:
        held = own[slice(*slots.q_own)]
        x = held.view(self._group_tokens, self._num_q_heads, own.shape[-1])
        pending = self._channel.start(
            _blocks(away, slots.q_away), self._rows_of_others([x]), f"the all-to-all of {what}"
        )
        return x, pending


def _pack(
    tensors: Sequence[torch.Tensor], slots: GroupSlots, rotation: Rotation | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the buffers `away` and `own`, each [slots, D], with this rank's tokens in place."""
    tensors = [unit_last_stride(x) for x in tensors]
    like = tensors[0]
    away = like.new_empty(slots.num_away, like.shape[-1])
    own = like.new_empty(slots.num_own, like.shape[-1])
    _movers(own).pack(tensors, away, own, slots.pieces, rotation)
    return away, own


def _blocks(away: torch.Tensor, blocks: Sequence[Block]) -> list[Message]:
    return [(block.rank, away[slice(*block.slots)]) for block in blocks]


def _flat(x: torch.Tensor) -> torch.Tensor:
    """Return x [..., D] as slots, [n, D]."""
    return x.reshape(-1, x.shape[-1])


def _movers(x: torch.Tensor) -> ModuleType:
    """Return who packs and unpacks buffers like x: the Triton kernel, or its definition.

    The definition works where attention's does, and on delta, whose D is 1.
    """
    if by_reference(x) or x.shape[-1] == 1:
        return pack_reference
    from hexiseq_triton.kernels import pack  # needs Triton

    return pack
