"""The ranks of a group trade tokens for heads and back, by the packing kernel and its definition.

On a GPU the kernel is compiled, elsewhere it runs in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from pack_runs import DEVICE, MARKS, random, rotation_of

from hexiseq_triton.group_slots import GroupSlots, Member, group_slots, members_of
from hexiseq_triton.kernels import pack as kernel
from hexiseq_triton.kernels import pack_reference as reference
from hexiseq_triton.kernels.rotation import Rotation, turn
from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.planner import Plan, Split

pytestmark = MARKS

UNEVEN = {
    "cut KV groups, a rank without tokens": [Split((20, 0, 13, 7), (5, 2, 6, 1))],
    "two groups with other cuts": [Split((20, 9), (5, 9)), Split((3, 4, 4), (7, 1, 6))],
    "a group of one": [Split((29,), (14,)), Split((6, 5), (3, 11))],
}


class Rank(NamedTuple):
    """One rank of a group, and its buffers."""

    member: Member
    slots: GroupSlots
    away: torch.Tensor
    own: torch.Tensor

    @property
    def rows(self) -> slice:
        return slice(*self.member.rows)

    def held(self, num_tokens: int) -> list[torch.Tensor]:
        """Return the rank's KV intervals, then its queries, each [L_g, n, D]."""
        ranges = (*self.slots.kv_own.values(), self.slots.q_own)
        return [
            self.own[start:stop].view(num_tokens, (stop - start) // num_tokens, -1)
            for start, stop in ranges
        ]


def messages(group: list[Rank], num_tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the blocks of every `away` buffer with the rows that mirror them in another's `own`."""
    for near in group:
        for far in group:
            blocks = [
                near.away[slice(*block.slots)]
                for block in (*near.slots.kv_away, *near.slots.q_away)
                if block.rank == far.member.rank
            ]
            rows = [x[near.rows].flatten(0, 1) for x in far.held(num_tokens)] if blocks else []
            yield from zip(blocks, rows, strict=True)


@pytest.mark.parametrize("name", UNEVEN)
@pytest.mark.parametrize("movers", [kernel, reference], ids=["kernel", "definition"])
def test_a_group_trades_tokens_for_heads_and_back(movers: ModuleType, name: str) -> None:
    plan = Plan.from_splits(UNEVEN[name], num_kv_heads=2)
    members = members_of(BatchLayout(plan, 0, (40,)))
    total = members[-1].rows[1]
    k, v, q = (random(total, heads, 8, seed=heads) for heads in (2, 2, 14))
    rotation = rotation_of("half-split", total, 8)
    group = []
    for member in members:
        slots = group_slots(members, member.rank, kv=True, q=True)
        buffers = (random(slots.num_away, 8), random(slots.num_own, 8))
        group.append(Rank(member, slots, *buffers))

    for rank in group:
        tensors = [x[rank.rows] for x in (k, v, q)]
        movers.pack(tensors, rank.away, rank.own, rank.slots.pieces, rows_of(rotation, rank))
    for block, rows in messages(group, total):
        rows.copy_(block)
    for rank in group:
        *kv, queries = rank.held(total)
        assert_near(queries, turn(q, rotation)[:, slice(*rank.member.q_heads)])
        for heads, both in zip(rank.slots.kv_own, kv, strict=True):
            keys, values = both.chunk(2, dim=1)
            assert_near(keys, turn(k, rotation)[:, slice(*heads)])
            assert torch.equal(values, v[:, slice(*heads)])

    for block, rows in messages(group, total):
        block.copy_(rows)
    replicas = torch.tensor([sum(held(m, head) for m in members) for head in range(2)])
    times = replicas[:, None].to(DEVICE)
    for rank in group:
        found = [torch.full_like(x[rank.rows], torch.nan) for x in (k, v, q)]
        movers.unpack(rank.away, rank.own, found, rank.slots.pieces, rows_of(rotation, rank))
        for x, expected in zip(found, (k * times, v * times, q), strict=True):
            assert_near(x, expected[rank.rows])


def held(member: Member, head: int) -> bool:
    return any(start <= head < stop for start, stop in member.kv_intervals)


def rows_of(rotation: Rotation, rank: Rank) -> Rotation:
    return rotation._replace(cos=rotation.cos[rank.rows], sin=rotation.sin[rank.rows])


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-6, atol=2e-6)
