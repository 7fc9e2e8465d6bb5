"""One batch over the plan's ranks: who holds which segments, which transfers attention needs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, chain
from zlib import crc32

import torch

from hexiseq_triton.errors import InputError
from hexiseq_triton.peer_places import Places, places_of
from hexiseq_triton.planner import Plan, RankShare
from hexiseq_triton.planner.heads import HeadRange
from hexiseq_triton.planner.partition import deal
from hexiseq_triton.planner.schedule import Transfer, atomic_intervals, intervals_of, transfers
from hexiseq_triton.rounds import Arrival, Exchange, Round, exchange_of
from hexiseq_triton.segments import Mask, RowRange, Segment, merge, num_tokens, take


class BatchLayout:
    """The segments of one batch, seen from one rank; built once a batch, used by all layers.

    Args:
        plan: the plan.
        rank: this rank of the plan; an idle rank holds no segment.
        document_lengths: tokens of each document of the rank's replica.
        number: of the batch, among those that the context has sharded; None for a layout alone.

    Attributes:
        is_alone: whether the rank holds its whole replica's batch, in its order.
        cu_seqlens: bounds of the documents in that batch, [documents + 1] int64 on the CPU.

    Raises:
        InputError: if the plan has no such rank, or a document fewer than 0 tokens.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        document_lengths: Sequence[int],
        number: int | None = None,
    ) -> None:
        if not 0 <= rank < plan.world_size:
            raise InputError(f"rank is {rank}; the plan has {plan.world_size}")
        self.plan = plan
        self.rank = rank
        self.document_lengths = tuple(document_lengths)
        if min(self.document_lengths, default=0) < 0:
            raise InputError(f"a document has {min(self.document_lengths)} tokens; 0 or more fit")
        self.number = number
        self.replica = plan.replica_of(rank)
        self.is_alone = self.replica is not None and len(plan.replicas[self.replica].shares) == 1
        self.cu_seqlens = torch.tensor([0, *accumulate(self.document_lengths)], device="cpu")
        self._rounds: dict[Mask, tuple[Round, ...]] = {}
        self._exchanges: dict[Mask, Exchange] = {}
        self._places: dict[Mask, Places] = {}

    @cached_property
    def _dealt(self) -> list[list[list[Segment]]]:
        return [] if self.replica is None else deal(self.plan, self.replica, self.document_lengths)

    @cached_property
    def _at(self) -> tuple[int, int]:
        """This rank's group and its position there."""
        assert self.replica is not None
        for g, group in enumerate(self.plan.replicas[self.replica].groups):
            for position, share in enumerate(group.ranks):
                if share.rank == self.rank:
                    return g, position
        raise AssertionError(f"rank {self.rank} is not in its replica")

    @property
    def segments(self) -> list[Segment]:
        """The tokens this rank holds in the token-wise layers, in row order."""
        return [] if self.replica is None else self._dealt[self._at[0]][self._at[1]]

    @property
    def num_tokens(self) -> int:
        return num_tokens(self.segments)

    @property
    def total_tokens(self) -> int:
        """Tokens of the whole batch of this replica."""
        return sum(self.document_lengths)

    @property
    def name(self) -> str:
        """What the batch is called where ranks compare theirs; the same on all of a replica."""
        number = "a batch" if self.number is None else f"batch {self.number}"
        lengths = crc32(repr(self.document_lengths).encode())
        documents = len(self.document_lengths)
        return f"{number} of {self.total_tokens} tokens in {documents} documents ({lengths:08x})"

    @property
    def segments_of_rank(self) -> dict[int, list[Segment]]:
        """The segments of every rank of this replica."""
        if self.replica is None:
            return {}
        groups = self.plan.replicas[self.replica].groups
        return {
            share.rank: segments
            for group, dealt in zip(groups, self._dealt, strict=True)
            for share, segments in zip(group.ranks, dealt, strict=True)
        }

    # ---------------------------------------------------------------- this rank's HP group

    @property
    def shares(self) -> tuple[RankShare, ...]:
        """The ranks of this rank's group, in the group's row order."""
        assert self.replica is not None
        return self.plan.replicas[self.replica].groups[self._at[0]].ranks

    @property
    def share(self) -> RankShare:
        return self.shares[self._at[1]]

    @cached_property
    def group_rows(self) -> list[RowRange]:
        """The rows of the group's tensors that each rank of the group owns."""
        counts = [num_tokens(segments) for segments in self._dealt[self._at[0]]]
        stops = list(accumulate(counts))
        return [(stop - count, stop) for count, stop in zip(counts, stops, strict=True)]

    @cached_property
    def group_segments(self) -> list[tuple[Segment, ...]]:
        """The segments of every group of the replica, in the group's row order."""
        return [tuple(merge(chain.from_iterable(group))) for group in self._dealt]

    @property
    def own_group_segments(self) -> tuple[Segment, ...]:
        return self.group_segments[self._at[0]]

    # ---------------------------------------------------------------- the exchange

    @cached_property
    def _intervals(self) -> list[HeadRange]:
        assert self.replica is not None
        return atomic_intervals(self.plan.replicas[self.replica])

    def intervals(self, share: RankShare) -> list[HeadRange]:
        """Return the atomic KV head intervals that a rank holds after the all-to-all."""
        return intervals_of(share, self._intervals)

    def rounds(self, mask: Mask) -> tuple[Round, ...]:
        """Return this rank's part of every round of transfers; all ranks walk all rounds."""
        if mask not in self._rounds:
            self._rounds[mask] = self._rounds_of(self.rank, self._transfers(mask, self.rank))
        return self._rounds[mask]

    def exchange(self, mask: Mask) -> Exchange:
        """Return the rounds, and where their rows stand in this rank's pools."""
        if mask not in self._exchanges:
            self._exchanges[mask] = exchange_of(self.rounds(mask))
        return self._exchanges[mask]

    def places(self, mask: Mask) -> Places:
        """Return where all ranks of the replica find each other's keys in memory they share."""
        if mask not in self._places:
            assert self.replica is not None
            together, rows = self._transfers(mask), {}
            for g, group in enumerate(self.plan.replicas[self.replica].groups):
                for share in group.ranks:
                    rows[share.rank] = num_tokens(self.group_segments[g])
            exchanges = {rank: exchange_of(self._rounds_of(rank, together)) for rank in rows}
            self._places[mask] = places_of(rows, exchanges)
        return self._places[mask]

    def _transfers(self, mask: Mask, rank: int | None = None) -> list[list[Transfer]]:
        """Return the transfers of a rank of this replica, or of all."""
        assert self.replica is not None
        replica, segments = self.plan.replicas[self.replica], self.group_segments
        return transfers(replica, segments, mask, self.plan.exchange, rank)

    def _rounds_of(self, rank: int, rounds: Sequence[Sequence[Transfer]]) -> tuple[Round, ...]:
        return tuple(
            Round(
                tuple(item for item in together if item.sender == rank),
                tuple(
                    Arrival(item, tuple(take(self.group_segments[item.group], item.rows)))
                    for item in together
                    if item.receiver == rank
                ),
            )
            for together in rounds
        )
