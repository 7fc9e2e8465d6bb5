"""Where heads stand in peer memory: each rank's buffer, and its pieces as another rank sees them.

A rank has one buffer, in which both directions of both passes follow each other (`peer_heads`):

    forward     in     keys and values of this rank's heads, then queries, all tokens
                out    outputs
    backward    in     gradients of outputs | ...                      | delta
                out    query gradients      | key and value gradients  | ...

Tokens' owners write what goes in and read what comes out. An *image* is what `group_slots` calls
`own`: a rank's heads of all tokens. Extents are those of the rank, offsets those of the largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from hexiseq_triton.group_slots import Member, group_slots, pieces_of_places
from hexiseq_triton.kernels.pieces import Piece, Pieces, Place
from hexiseq_triton.planner.heads import HeadRange

_ALIGNMENT = 4096  # bytes: a multiple of every slot's size
_MOST_STATE_BYTES = 8  # of one number


class Regions(NamedTuple):
    """What stands where in the buffers of a group, in bytes: offsets, and a buffer's size."""

    kv_gradients: int
    delta: int
    num_bytes: int


class PeerPieces(Pieces):
    """Pieces whose places lie in peers' buffers, at any distance from this rank's own."""

    def num_slots(self, num_tokens: int) -> tuple[int, int]:
        """Return that they need no slot of the launch's own buffers."""
        return 0, 0


@lru_cache(maxsize=256)
def regions(members: tuple[Member, ...], slot_bytes: int, state_slot_bytes: int) -> Regions:
    """Return where everything stands for a group, as large as its largest rank needs it.

    Args:
        members: the ranks of the group.
        slot_bytes: one head of one token, in the inputs' dtype.
        state_slot_bytes: the same in the state dtype.
    """
    images = [group_slots(members, member.rank, kv=True) for member in members]
    tokens = members[-1].rows[1]
    heads = max(member.q_heads[1] - member.q_heads[0] for member in members)
    kv_slots = max(image.num_own for image in images)
    sums = any(image.replicated for image in images)  # added up where they arrive
    kv_gradients = _aligned(heads * tokens * slot_bytes)
    # and with that there is room for keys, values and queries, whose slots are no larger
    delta = _aligned(kv_gradients + kv_slots * (state_slot_bytes if sums else slot_bytes))
    return Regions(kv_gradients, delta, delta + heads * tokens * _MOST_STATE_BYTES)


@lru_cache(maxsize=256)
def peer_pieces(
    members: tuple[Member, ...],
    rank: int,
    starts: tuple[int, ...],
    *,
    image: tuple[bool, bool],
    moves: tuple[bool, bool],
) -> PeerPieces:
    """Return where the heads of `rank`'s tokens stand in the images of all members.

    Args:
        members: the ranks of the group.
        rank: whose tokens move.
        starts: for each member, how many slots behind this rank's buffer its image begins.
        image: whether images hold keys and values, and whether they hold queries.
        moves: which of these the launch moves.
    """
    first_row = next(member.rows[0] for member in members if member.rank == rank)
    pieces: list[Piece] = []
    for is_kv, moving in zip((True, False), moves, strict=True):
        if not moving:
            continue
        num_tensors = 2 if is_kv else 1
        places: dict[HeadRange, list[Place]] = {}
        for member, start in zip(members, starts, strict=True):
            slots = group_slots(members, member.rank, kv=image[0], q=image[1])
            held = slots.kv_own if is_kv else {member.q_heads: slots.q_own}
            for heads, (begin, _) in held.items():
                row = num_tensors * (heads[1] - heads[0])
                place = Place(False, start + begin + first_row * row, row)
                places.setdefault(heads, []).append(place)
        pieces += pieces_of_places(places, num_tensors, 0 if is_kv else 2 * moves[0])
    return PeerPieces(pieces)


def slots_apart(distances: Sequence[int], offset: int, slot_bytes: int) -> tuple[int, ...]:
    """Return for buffers at these distances where the one at byte `offset` in each begins."""
    return tuple((distance + offset) // slot_bytes for distance in distances)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
