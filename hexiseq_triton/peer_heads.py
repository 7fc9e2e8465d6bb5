"""The ragged all-to-all by peer memory: owners of tokens write heads to where they are needed.

In:   one launch packs keys, values and queries straight into the buffers of their ranks. After a
      barrier a copy leaves the buffer, since what attention saves must outlive it.
Out:  attention writes into the rank's own buffer. After a barrier one launch unpacks: it reads
      the heads of its tokens from all ranks, and writes them joined.

Both use one buffer. Three barriers keep what ranks do to each other's apart:

    barrier    all ranks have read what the last call left
    in         ranks write into each other's buffers, each to places of its own
    barrier
    between    a rank copies, reads and writes in its own buffer alone
    barrier
    out        ranks read each other's buffers, and nobody writes

The first stands before the next call's writes and not after the reads, when the others are likely
to be done. So a call asks nothing of the one before it, which may be of either pass and of another
layout. (A backward after a call of the same layout writes only where it has read itself, and would
not need it.) Where queries leave after the keys, by a write and a barrier of their own, others may
already copy their keys: queries have other places.

In its own buffer a rank goes by its stream. Outputs are written when the inputs have been copied.
Attention reads do where it arrived while it writes dk and dv, which stand apart from it; dq takes
the place of do when attention is through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hexiseq_triton.channel import Pending
from hexiseq_triton.context import ParallelContext
from hexiseq_triton.heads import KV, HeadExchange, HeadInputs, movers
from hexiseq_triton.kernels import state_dtype
from hexiseq_triton.kernels.attention import by_reference
from hexiseq_triton.kernels.options import unit_last_stride
from hexiseq_triton.kernels.rotation import Rotation
from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.peer_memory import PeerMemory
from hexiseq_triton.peer_slots import PeerPieces, peer_pieces, regions, slots_apart

_LARGEST_SLOT = 1024  # bytes; slots must divide the distance of buffers, so powers of two


def head_exchange(
    context: ParallelContext, layout: BatchLayout, like: torch.Tensor
) -> HeadExchange:
    """Return who moves heads of tensors like `like` [T, H, D]: by peer memory where that can."""
    memory = context.peer_memory
    slot_bytes = like.shape[-1] * like.element_size()
    fits = slot_bytes & (slot_bytes - 1) == 0 and slot_bytes <= _LARGEST_SLOT
    if memory is None or not fits or by_reference(like):
        return HeadExchange(context.heads, layout)
    return PeerHeadExchange(context, memory, layout, like)


class _Later(Pending):
    """Work that is put on the stream when it is waited for."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__((), (), "")
        self._work = work

    def wait(self) -> None:
        self._work()


class PeerHeadExchange(HeadExchange):
    """The all-to-alls of one rank of a group that shares memory; see `HeadExchange`.

    Args:
        context: the live plan.
        memory: the group's buffers.
        layout: who holds what.
        like: a tensor of the dtype and head dimension that move.
    """

    def __init__(
        self, context: ParallelContext, memory: PeerMemory, layout: BatchLayout, like: torch.Tensor
    ) -> None:
        super().__init__(context.heads, layout)
        self._memory = memory
        self._dtype, self._state = like.dtype, state_dtype(like.dtype)
        self._head_dim = like.shape[-1]
        self._slot_bytes = self._head_dim * self._dtype.itemsize
        state_bytes = self._head_dim * self._state.itemsize
        self._regions = regions(self._members, self._slot_bytes, state_bytes)
        memory.reserve(self._regions.num_bytes)

    # ---------------------------------------------------------------- to heads

    def start_inputs(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotation: Rotation | None
    ) -> HeadInputs:
        """See `HeadExchange`."""
        slots = self._slots(kv=True, q=True)
        image = self._memory.local(0, (slots.num_own, self._head_dim), self._dtype)
        own = torch.empty_like(image)
        middle = slots.q_own[0]

        def move(tensors: Sequence[torch.Tensor], kv: bool, queries: bool) -> None:
            first, last = 0 if kv else middle, slots.num_own if queries else middle
            if kv:  # nothing of this call has left before
                self._memory.barrier()
            self._push(tensors, (True, True), (kv, queries), rotation)
            self._memory.barrier()
            own[first:last].copy_(image[first:last])

        if self._keys_first:
            kv_pending: Pending = _Later(lambda: move((k, v), True, False))
            q_pending: Pending = _Later(lambda: move((q,), False, True))
        else:
            kv_pending = _Later(lambda: move((k, v, q), True, True))
            q_pending = Pending((), (), "queries")
        kv_parts = self._kv_parts(own, slots)
        return HeadInputs(self._q_part(own, slots), kv_parts, q_pending, kv_pending)

    def start_gradients(
        self, do: torch.Tensor, delta: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor], Pending]:
        """See `HeadExchange`; do stays in the buffer, where attention reads it."""
        self._memory.barrier()
        self._push((do,), (False, True), (False, True), None)
        for peer, member in enumerate(self._members):
            heads = member.q_heads[1] - member.q_heads[0]
            block = self._delta_block(peer, heads, *self._own_rows)
            if block.numel():
                block.copy_(delta[slice(*member.q_heads)])
        self._memory.barrier()
        slots = self._slots(q=True)
        image = self._memory.local(0, (slots.num_own, self._head_dim), self._dtype)
        blocks = [
            self._delta_block(None, self._num_q_heads, *member.rows) for member in self._members
        ]
        return self._q_part(image, slots), blocks, Pending((), (), "gradients")

    def _delta_block(self, peer: int | None, heads: int, start: int, stop: int) -> torch.Tensor:
        """Return the delta of some rows, [heads, rows], in a peer's buffer or in this rank's."""
        offset = self._regions.delta + start * heads * self._state.itemsize
        shape = heads, stop - start
        if peer is None:
            return self._memory.local(offset, shape, self._state)
        return self._memory.remote(peer, offset, shape, self._state)

    def _push(
        self,
        tensors: Sequence[torch.Tensor],
        image: tuple[bool, bool],
        moves: tuple[bool, bool],
        rotation: Rotation | None,
    ) -> None:
        base, pieces = self._pieces(0, self._dtype, image, moves)
        movers(base).pack([unit_last_stride(x) for x in tensors], base, base, pieces, rotation)

    # ---------------------------------------------------------------- to tokens

    def outputs_room(self, like: torch.Tensor) -> torch.Tensor:
        """See `HeadExchange`."""
        shape = self._group_tokens, self._num_q_heads, self._head_dim
        return self._memory.local(0, shape, self._dtype)

    def outputs_to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """See `HeadExchange`; x must be the room."""
        self._memory.barrier()
        return self._pull_queries(None)

    def kv_gradient_room(self, like: torch.Tensor, *, sums: bool) -> tuple[torch.Tensor, KV]:
        """See `HeadExchange`; in the buffer, unless it is rounded on its way there."""
        slots = self._slots(kv=True)
        if sums and not slots.replicated:
            return super().kv_gradient_room(like, sums=True)
        own = self._kv_gradients(self._state if slots.replicated else self._dtype)
        return own, self._kv_parts(own, slots)

    def gradients_to_tokens(
        self,
        dq: torch.Tensor,
        own: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
        rotation: Rotation | None,
    ) -> torch.Tensor:
        """See `HeadExchange`."""
        self.outputs_room(dq).copy_(dq)
        dtype = self._state if self._slots(kv=True).replicated else self._dtype
        room = self._kv_gradients(dtype)
        if own.data_ptr() != room.data_ptr():
            room.copy_(own)
        self._memory.barrier()
        kinds = (True, False)
        base, pieces = self._pieces(self._regions.kv_gradients, dtype, kinds, kinds)
        movers(base).unpack(base, base, (dk, dv), pieces, rotation)
        return self._pull_queries(rotation)

    def _kv_gradients(self, dtype: torch.dtype) -> torch.Tensor:
        shape = self._slots(kv=True).num_own, self._head_dim
        return self._memory.local(self._regions.kv_gradients, shape, dtype)

    def _pull_queries(self, rotation: Rotation | None) -> torch.Tensor:
        kinds = (False, True)
        base, pieces = self._pieces(0, self._dtype, kinds, kinds)
        tokens = self._tokens_room(base)
        movers(base).unpack(base, base, (tokens,), pieces, rotation)
        return tokens

    # ---------------------------------------------------------------- addresses

    def _pieces(
        self, offset: int, dtype: torch.dtype, image: tuple[bool, bool], moves: tuple[bool, bool]
    ) -> tuple[torch.Tensor, PeerPieces]:
        """Return this rank's buffer [1, D], from which places count, and the pieces."""
        slot_bytes = self._head_dim * dtype.itemsize
        starts = slots_apart(self._memory.distances(), offset, slot_bytes)
        pieces = peer_pieces(self._members, self._rank, starts, image=image, moves=moves)
        return self._memory.local(0, (1, self._head_dim), dtype), pieces

    @property
    def _own_rows(self) -> tuple[int, int]:
        return next(member.rows for member in self._members if member.rank == self._rank)
