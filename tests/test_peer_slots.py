"""Peer memory on one process: the buffers of all ranks lie in one tensor, at their distances."""

from __future__ import annotations

import os
from types import ModuleType

import pytest
import torch

from hexiseq_triton.group_slots import Member, group_slots, members_of
from hexiseq_triton.kernels import pack_reference as reference
from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.peer_slots import Regions, peer_pieces, regions, slots_apart
from hexiseq_triton.planner import Plan, Split

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the first import of Triton
pytest.importorskip("triton")

from hexiseq_triton.kernels import pack as kernels  # noqa: E402

pytestmark = [
    *([pytest.mark.gpu] if DEVICE == "cuda" else []),
    # the interpreter turns loop bounds into ints
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]

D = 16
KV_HEADS = 4
SPLITS = {
    "even": Split((8, 8), (4, 4)),
    "uneven": Split((11, 3, 6), (3, 4, 1)),
    "a KV head on three ranks": Split((5, 4, 7), (1, 6, 1)),
    "no tokens, no heads": Split((0, 9, 6), (3, 0, 5)),
}
MOVERS = [pytest.param(reference, id="reference"), pytest.param(kernels, id="kernel")]
BOTH, KV, Q = (True, True), (True, False), (False, True)


class Group:
    """A group's buffers in one tensor, and random tensors of all its tokens."""

    def __init__(self, split: Split) -> None:
        plan = Plan.from_splits([split], num_kv_heads=KV_HEADS)
        layouts = [BatchLayout(plan, rank, (plan.seq_len,)) for rank in range(len(split.tokens))]
        self.members: tuple[Member, ...] = members_of(layouts[0])
        self.tokens, self.heads = plan.seq_len, plan.num_heads
        self.regions: Regions = regions(self.members, 4 * D, 4 * D)
        self.slots = -(-self.regions.num_bytes // (4 * D))
        self.memory = torch.full((len(layouts) * self.slots, D), torch.nan, device=DEVICE)
        torch.manual_seed(0)
        self.q = torch.randn(self.tokens, self.heads, D, device=DEVICE)
        self.k, self.v = (torch.randn(self.tokens, KV_HEADS, D, device=DEVICE) for _ in range(2))

    def base(self, rank: int) -> torch.Tensor:
        return self.memory[rank * self.slots :][:1]

    def starts(self, rank: int, offset: int) -> tuple[int, ...]:
        away = [(other - rank) * self.slots * 4 * D for other in range(len(self.members))]
        return slots_apart(away, offset, 4 * D)

    def image(self, rank: int, offset: int, num_slots: int) -> torch.Tensor:
        return self.memory[rank * self.slots + offset // (4 * D) :][:num_slots]

    def parts(self, image: torch.Tensor, rank: int, kinds: tuple[bool, bool]) -> list[torch.Tensor]:
        """Return keys and values of each interval, then queries, as views of an image."""
        slots = group_slots(self.members, rank, kv=kinds[0], q=kinds[1])
        kv = [
            image[slice(*held)].view(self.tokens, 2, stop - start, D)
            for (start, stop), held in slots.kv_own.items()
        ]
        return [*kv, image[slice(*slots.q_own)].view(self.tokens, -1, D)] if kinds[1] else kv


@pytest.mark.parametrize("movers", MOVERS)
@pytest.mark.parametrize("name", SPLITS)
def test_all_ranks_together_fill_every_image(name: str, movers: ModuleType) -> None:
    group = Group(SPLITS[name])
    for member in group.members:
        pieces = peer_pieces(
            group.members, member.rank, group.starts(member.rank, 0), image=BOTH, moves=BOTH
        )
        base, rows = group.base(member.rank), slice(*member.rows)
        movers.pack([x[rows] for x in (group.k, group.v, group.q)], base, base, pieces)
    for member in group.members:
        slots = group_slots(group.members, member.rank, kv=True, q=True)
        *kv, q = group.parts(group.image(member.rank, 0, slots.num_own), member.rank, BOTH)
        assert torch.equal(q, group.q[:, slice(*member.q_heads)])
        for interval, part in zip(member.kv_intervals, kv, strict=True):
            assert torch.equal(part[:, 0], group.k[:, slice(*interval)])
            assert torch.equal(part[:, 1], group.v[:, slice(*interval)])


@pytest.mark.parametrize("movers", MOVERS)
@pytest.mark.parametrize("name", SPLITS)
def test_queries_that_leave_later_join_the_same_image(name: str, movers: ModuleType) -> None:
    group = Group(SPLITS[name])
    for moves, tensors in ((KV, (group.k, group.v)), (Q, (group.q,))):
        for member in group.members:
            pieces = peer_pieces(
                group.members, member.rank, group.starts(member.rank, 0), image=BOTH, moves=moves
            )
            base, rows = group.base(member.rank), slice(*member.rows)
            movers.pack([x[rows] for x in tensors], base, base, pieces)
    for member in group.members:
        slots = group_slots(group.members, member.rank, kv=True, q=True)
        image = group.image(member.rank, 0, slots.num_own)
        assert not image.isnan().any()
        assert torch.equal(
            group.parts(image, member.rank, BOTH)[-1], group.q[:, slice(*member.q_heads)]
        )


@pytest.mark.parametrize("movers", MOVERS)
@pytest.mark.parametrize("name", SPLITS)
def test_owners_read_their_tokens_from_all_images_and_add_replicas(
    name: str, movers: ModuleType
) -> None:
    group = Group(SPLITS[name])
    replicas = torch.zeros(KV_HEADS, device=DEVICE)
    for member in group.members:
        for kinds, offset in ((Q, 0), (KV, group.regions.kv_gradients)):
            slots = group_slots(group.members, member.rank, kv=kinds[0], q=kinds[1])
            image = group.image(member.rank, offset, slots.num_own)
            parts = group.parts(image, member.rank, kinds)
            if kinds is Q:
                parts[0].copy_(group.q[:, slice(*member.q_heads)])
                continue
            for interval, part in zip(member.kv_intervals, parts, strict=True):
                replicas[slice(*interval)] += 1
                part[:, 0], part[:, 1] = group.k[:, slice(*interval)], group.v[:, slice(*interval)]
    for member in group.members:
        base, rows = group.base(member.rank), slice(*member.rows)
        q, k, v = (torch.empty_like(x[rows]) for x in (group.q, group.k, group.v))
        for kinds, offset, tensors in (
            (Q, 0, (q,)),
            (KV, group.regions.kv_gradients, (k, v)),
        ):
            starts = group.starts(member.rank, offset)
            pieces = peer_pieces(group.members, member.rank, starts, image=kinds, moves=kinds)
            movers.unpack(base, base, tensors, pieces)
        assert torch.equal(q, group.q[rows])
        torch.testing.assert_close(k, group.k[rows] * replicas[:, None])
        torch.testing.assert_close(v, group.v[rows] * replicas[:, None])


@pytest.mark.parametrize("name", SPLITS)
def test_every_rank_has_room_for_what_stands_there_at_a_time(name: str) -> None:
    group = Group(SPLITS[name])
    slot, state = 2 * D, 4 * D
    there = regions(group.members, slot, state)
    for member in group.members:
        inputs, queries, kv = (
            group_slots(group.members, member.rank, kv=kinds[0], q=kinds[1])
            for kinds in (BOTH, Q, KV)
        )
        heads = member.q_heads[1] - member.q_heads[0]
        assert inputs.num_own * slot <= there.num_bytes
        assert queries.num_own * slot <= there.kv_gradients
        gradients = kv.num_own * (state if kv.replicated else slot)
        assert there.kv_gradients + gradients <= there.delta
        assert there.delta + heads * group.tokens * state // D <= there.num_bytes
