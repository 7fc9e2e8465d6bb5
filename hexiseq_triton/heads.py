"""The ragged all-to-all inside a head-parallel group: tokens to heads, and heads to tokens.

A rank holds s_d tokens of all heads, and afterwards its heads of all L_g tokens. One launch packs
all that it sends, turned by RoPE on the way; the blocks it receives stand one after the other and
already are the result. On the way back the rows for each rank are contiguous, and unpacking joins
the heads, adds the replicas of KV heads in rank order, and turns gradients back. What stays on the
rank is packed and unpacked by launches of its own, while the rest travels.
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
from hexiseq_triton.kernels.pieces import Pieces
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
        self._keys_first = len(layout.group_segments) > 1

    def start_inputs(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotation: Rotation | None
    ) -> HeadInputs:
        """Start moving q [s_d, H, D], k and v [s_d, H_kv, D] to the ranks of their heads.

        Keys and values leave first if other groups wait for them. With `rotation` q and k arrive
        turned.
        """
        q_stays = self._stays(rotation)
        slots = self._slots(kv=True, q=not q_stays)
        packing = _Packing((k, v) if q_stays else (k, v, q), slots, rotation)
        away, own = packing.away, packing.own
        kv = self._kv_parts(own, slots)
        q_heads = unit_last_stride(q) if q_stays else self._q_part(own, slots)
        kv_moves = _blocks(away, slots.kv_away), self._rows_of_others(kv.values())
        q_moves = _blocks(away, slots.q_away), [] if q_stays else self._rows_of_others([q_heads])
        if self._keys_first:
            kv_pending = self._channel.start(*kv_moves, "the all-to-all of keys and values")
            q_pending = self._channel.start(*q_moves, "the all-to-all of queries")
        else:
            sends, receives = (a + b for a, b in zip(kv_moves, q_moves, strict=True))
            kv_pending = self._channel.start(sends, receives, "the all-to-all of inputs")
            q_pending = Pending((), (), "queries")
        packing.pack_staying()
        return HeadInputs(q_heads, kv, q_pending, kv_pending)

    def start_gradients(
        self, do: torch.Tensor, delta: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor], Pending]:
        """Start moving do [s_d, H, D] and delta [H, s_d] to the ranks of their heads.

        Returns do [L_g, h_d, D], delta in blocks [h_d, rows] of the group's rows in their order,
        and what to wait for.
        """
        if self._stays(None):
            return unit_last_stride(do), [delta], Pending((), (), "gradients")
        slots = self._slots(q=True)
        packing = _Packing((do,), slots, None)
        x = self._q_part(packing.own, slots)
        held = {member.rank: delta[slice(*member.q_heads)] for member in self._members}
        blocks = {
            member.rank: delta.new_empty(self._num_q_heads, member.rows[1] - member.rows[0])
            for member in self._members
        }
        blocks[self._rank] = held.pop(self._rank)
        pending = self._channel.start(
            [*_blocks(packing.away, slots.q_away), *held.items()],
            [*self._rows_of_others([x]), *((rank, blocks[rank]) for rank in held)],
            "the all-to-all of gradients",
        )
        packing.pack_staying()
        return x, list(blocks.values()), pending

    def outputs_room(self, like: torch.Tensor) -> torch.Tensor:
        """Return room for the outputs [L_g, h_d, D] of this rank's query heads."""
        return like.new_empty(self._group_tokens, self._num_q_heads, like.shape[-1])

    def outputs_to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Move `outputs_room` back to [s_d, H, D], all heads of this rank's tokens."""
        if self._stays(None):
            return x
        slots = self._slots(q=True)
        away = x.new_empty(slots.num_away, x.shape[-1])
        pending = self._channel.start(
            self._rows_of_others([x]), _blocks(away, slots.q_away), "the all-to-all of outputs"
        )
        tokens = self._tokens_room(x)
        _unpack(pending, [_Unpacking(away, _flat(x), (tokens,), slots, None)])
        return tokens

    def kv_gradient_room(self, like: torch.Tensor, *, sums: bool) -> tuple[torch.Tensor, KV]:
        """Return slots for this rank's dK and dV, and the parts as views.

        They are in the state dtype if anything is added to them: where `sums` says so, and to the
        replicas of a KV head.
        """
        slots = self._slots(kv=True)
        dtype = state_dtype(like.dtype) if sums or slots.replicated else like.dtype
        own = like.new_empty(slots.num_own, like.shape[-1], dtype=dtype)
        return own, self._kv_parts(own, slots)

    def gradients_to_tokens(
        self,
        dq: torch.Tensor,
        own: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
        rotation: Rotation | None,
    ) -> torch.Tensor:
        """Move gradients to their tokens' owners: return dq [s_d, H, D], and write dk and dv.

        With `rotation` dq and dk are turned back. Replicas of a KV head are added in the group's
        rank order, so the sum is the same in every run.

        Args:
            dq: gradients of this rank's query heads, [L_g, h_d, D] in any float dtype.
            own: what `kv_gradient_room` returned.
            dk, dv: room for the gradients, [s_d, H_kv, D] in the inputs' dtype.
            rotation: what turned the inputs.
        """
        dq = dq.to(dk.dtype)
        q_slots, kv_slots = self._slots(q=True), self._slots(kv=True)
        if not kv_slots.replicated and len(self._members) > 1:
            own = own.to(dk.dtype)  # rounded once in any case; half as much to move
        q_away = dq.new_empty(q_slots.num_away, dq.shape[-1])
        kv_away = own.new_empty(kv_slots.num_away, own.shape[-1])
        parts = self._kv_parts(own, kv_slots).values()
        pending = self._channel.start(
            [*self._rows_of_others([dq]), *self._rows_of_others(parts)],
            [*_blocks(q_away, q_slots.q_away), *_blocks(kv_away, kv_slots.kv_away)],
            "the all-to-all of query, key and value gradients",
        )
        keys = _Unpacking(kv_away, own, (dk, dv), kv_slots, rotation)
        if self._stays(rotation):
            _unpack(pending, [keys])
            return dq
        tokens = self._tokens_room(dq)
        queries = _Unpacking(q_away, _flat(dq), (tokens,), q_slots, rotation)
        _unpack(pending, [keys, queries])
        return tokens

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

    def _q_part(self, own: torch.Tensor, slots: GroupSlots) -> torch.Tensor:
        """Return the queries [L_g, h_d, D] of this rank's heads."""
        held = own[slice(*slots.q_own)]
        return held.view(self._group_tokens, self._num_q_heads, own.shape[-1])

    def _tokens_room(self, like: torch.Tensor) -> torch.Tensor:
        """Return room for all query heads of this rank's tokens, [s_d, H, D]."""
        num_heads = max(member.q_heads[1] for member in self._members)
        return like.new_empty(self._tokens, num_heads, like.shape[-1])

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


class _Packing:
    """This rank's tokens on their way into the buffers `away` and `own`, each [slots, D].

    What leaves is packed at once; `own` is whole after `pack_staying`.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], slots: GroupSlots, rotation: Rotation | None
    ) -> None:
        self._tensors = [unit_last_stride(x) for x in tensors]
        self._slots, self._rotation = slots, rotation
        like = self._tensors[0]
        self.away = like.new_empty(slots.num_away, like.shape[-1])
        self.own = like.new_empty(slots.num_own, like.shape[-1])
        self._pack(slots.leaving)

    def pack_staying(self) -> None:
        self._pack(self._slots.staying)

    def _pack(self, pieces: Pieces) -> None:
        if any(pieces):
            movers(self.own).pack(self._tensors, self.away, self.own, pieces, self._rotation)


class _Unpacking(NamedTuple):
    """What `unpack` of the kernels is called with."""

    away: torch.Tensor
    own: torch.Tensor
    tensors: tuple[torch.Tensor, ...]
    slots: GroupSlots
    rotation: Rotation | None

    def unpack(self, pieces: Pieces) -> None:
        if any(pieces):
            movers(self.own).unpack(self.away, self.own, self.tensors, pieces, self.rotation)


def _unpack(pending: Pending, unpacking: Sequence[_Unpacking]) -> None:
    """Unpack what stayed, wait, and unpack what arrives; sums need both and wait for it."""
    for each in unpacking:
        if not each.slots.replicated:
            each.unpack(each.slots.staying)
    pending.wait()
    for each in unpacking:
        each.unpack(each.slots.pieces if each.slots.replicated else each.slots.leaving)


def _blocks(away: torch.Tensor, blocks: Sequence[Block]) -> list[Message]:
    return [(block.rank, away[slice(*block.slots)]) for block in blocks]


def _flat(x: torch.Tensor) -> torch.Tensor:
    """Return x [..., D] as slots, [n, D]."""
    return x.reshape(-1, x.shape[-1])


def movers(x: torch.Tensor) -> ModuleType:
    """Return who packs and unpacks buffers like x: the Triton kernel, or its definition.

    The definition works where attention's does.
    """
    if by_reference(x):
        return pack_reference
    from hexiseq_triton.kernels import pack  # needs Triton

    return pack
