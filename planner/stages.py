"""What the stages of the search share: the problem, its speeds, and group splits already made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from hexiseq_triton.planner.cost import Cost, evaluate
from hexiseq_triton.planner.group_time import Members, directions, kv_heads_held
from hexiseq_triton.planner.inner import first_split, split_group
from hexiseq_triton.planner.memory import BUFFERED, FIXED, memory_model
from hexiseq_triton.planner.problem import Arrangement, Group, Layout, Problem, Replica
from hexiseq_triton.planner.rates import Ints
from hexiseq_triton.planner.speeds import (
    ATTENTION_BACKWARD,
    ATTENTION_FORWARD,
    BLOCK,
    BUFFER,
    COMMUNICATOR,
    HEADS,
    PEER_FIXED,
    Q_PER_KV,
    ROOM,
    Speeds,
)
from hexiseq_triton.planner.split import TOKEN_UNIT

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Frame:
    """What a layout is besides its replicas."""

    name: str
    accumulation: int
    arrangement: Arrangement = "balanced"

    @classmethod
    def of(cls, layout: Layout) -> Frame:
        return cls(layout.name, layout.accumulation, layout.arrangement)


@dataclass
class Splitter:
    """Splits groups by stage III, each kind of group once for every number of tokens."""

    problem: Problem
    _splits: dict[object, tuple[tuple[int, ...], tuple[int, ...], float]] = field(
        default_factory=dict
    )

    _makes: dict[Ranks, tuple[Ranks, Ranks]] = field(default_factory=dict)
    evaluations: int = 0

    def judged(self, frame: Frame, replicas: Sequence[Replica]) -> Cost:
        """Return what the evaluator says of some replicas; ranks in none of them are idle.

        Work of documents counts as even along the stream here, which is much faster.
        """
        self.evaluations += 1
        layout = Layout(frame.name, tuple(replicas), frame.accumulation, frame.arrangement)
        return evaluate(self.problem, layout, fluid=True)

    def judged_apart(
        self, frame: Frame, replicas: Sequence[Replica], names: Sequence[str]
    ) -> list[Cost]:
        """Return the same of each replica alone; evaluated side by side, which is much faster."""
        cost = self.judged(frame, replicas)
        self.evaluations += len(replicas) - 1
        return [cost.of_replica(index, name) for index, name in enumerate(names)]

    @cached_property
    def speeds(self) -> Speeds:
        return Speeds.of(self.problem)

    @cached_property
    def kind(self) -> list[int]:
        """The kind of every rank."""
        return [int(kind) for kind in self.speeds.kind]

    @cached_property
    def node(self) -> list[int]:
        """The node of every rank."""
        return [int(node) for node in self.speeds.node]

    @cached_property
    def unit(self) -> int:
        """Tokens of a block: single tokens for very short streams."""
        workload = self.problem.workload
        short = workload.seq_len < 4 * TOKEN_UNIT * self.problem.cluster.world_size
        return 1 if short else TOKEN_UNIT

    def make(self, ranks: Ranks) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return what a group is made of: kinds, and which of its ranks share a node."""
        if ranks not in self._makes:
            kind, node = self.kind, self.node
            nodes: dict[int, int] = {}
            local = [nodes.setdefault(node[r], len(nodes)) for r in ranks]
            self._makes[ranks] = tuple([kind[r] for r in ranks]), tuple(local)
        return self._makes[ranks]

    def members(self, ranks: Ranks, alone: bool) -> Members:
        """Return the ranks of a group; `alone` in its replica, it receives no keys and values."""
        speeds, at = self.speeds, list(ranks)
        buffers = 0.0 if alone else float(speeds.shared[BUFFER])
        shared, moments = speeds.shared, speeds.moments
        return Members(speeds.by_rank[at], speeds.node[at], shared, moments, buffers)

    def split(
        self, ranks: Ranks, num_tokens: int, alone: bool, quick: bool = False
    ) -> tuple[Group, float]:
        """Return the group with `num_tokens` split, and seconds of its layer without exchange.

        Args:
            ranks: of the group, in the order of their heads.
            num_tokens: of the group.
            alone: whether it is its replica's only group, and so receives no keys and values.
            quick: leave out what couples tokens and heads.
        """
        key = (self.make(ranks), num_tokens, alone, quick)
        if key not in self._splits:
            members = self.members(ranks, alone)
            place = first_split if quick else split_group
            tokens, heads = place(num_tokens, self.unit, members)
            held = kv_heads_held(heads, int(members.shared[Q_PER_KV]))
            seconds = sum(directions(tokens, heads, held, members))
            self._splits[key] = (tuple(tokens.tolist()), tuple(heads.tolist()), float(seconds))
        shares, counts, seconds = self._splits[key]
        return Group(ranks, shares, counts), seconds

    @cached_property
    def alone(self) -> list[float]:
        """Tokens a second of every rank alone, all heads included: the measure of its speed."""
        phases = self.speeds.by_rank[:, : ATTENTION_BACKWARD + 1]
        heads = self.speeds.shared[HEADS]
        seconds = phases[:, :ATTENTION_FORWARD].sum(axis=1)
        seconds = seconds + heads * phases[:, ATTENTION_FORWARD:].sum(axis=1)
        return [float(rate) for rate in 1 / seconds]

    def split_on(
        self, ranks: Ranks, working: Ranks, num_tokens: int, alone: bool, quick: bool
    ) -> Group:
        """Return the group with all tokens and heads on some of its ranks, split among them."""
        group, _ = self.split(working, num_tokens, alone, quick)
        held = dict(zip(group.ranks, zip(group.tokens, group.heads, strict=True), strict=True))
        shares = [held.get(rank, (0, 0)) for rank in ranks]
        tokens, heads = zip(*shares, strict=True)
        return Group(ranks, tokens, heads)

    def room_for_tokens(self, ranks: Sequence[int], alone: bool) -> float:
        """Return how many tokens the memory of ranks holds, with all heads once.

        Args:
            ranks: of a group, or of a replica.
            alone: whether they receive no keys and values of other groups.
        """
        rooms, buffers, sizes, lent = self._room
        most = math.inf
        for room, taken, size in zip(rooms, buffers, sizes, strict=True):
            left = sum([room[rank] for rank in ranks])
            most = min(most, left / size if alone else (left - taken) / (size + lent))
        return max(0.0, most)

    @cached_property
    def room_for_buffers(self) -> float:
        """Tokens that would fit in place of a group's receive buffers."""
        _, buffers, sizes, _ = self._room
        return max(taken / size for taken, size in zip(buffers, sizes, strict=True))

    @cached_property
    def _room(self) -> tuple[list[list[float]], list[float], list[float], float]:
        """Bytes left on every rank, of a group's receive buffers, and of a token and its heads.

        All three are of each of the memory model's moments that has tokens. What a group of one
        node needs besides (`memory.peer_fixed`) is taken off every rank. Last, bytes of a token's
        keys where other groups fetch them.
        """
        shared, memory = self.speeds.shared, memory_model(self.problem)
        sizes = memory.whole_tokens(self.problem.model)
        left = self.speeds.by_rank[:, ROOM] - shared[PEER_FIXED] - shared[COMMUNICATOR]
        rooms = left - memory.moments[:, FIXED, None]
        kv_heads = shared[HEADS] / shared[Q_PER_KV]
        buffers = memory.moments[:, BUFFERED] * kv_heads * shared[BUFFER]
        some = sizes > 0
        lent = float(kv_heads * shared[BLOCK])
        return rooms[some].tolist(), buffers[some].tolist(), sizes[some].tolist(), lent


def whole_units(total: int, shares: Sequence[float], unit: int) -> list[int]:
    """Round shares of `total` to blocks of `unit`, the remainder to the largest share.

    Args:
        total: what the result adds up to.
        shares: real numbers that add up to about `total`, none negative.
        unit: tokens of a block.
    """
    units, rest = divmod(total, unit)
    exact = np.array(shares) * (units / max(sum(shares), 1e-300))
    counts: Ints = np.floor(exact).astype(np.int64)
    order = np.argsort(counts - exact, kind="stable")
    counts[order[: units - int(counts.sum())]] += 1
    tokens = [unit * int(count) for count in counts]
    tokens[int(np.argmax(exact))] += rest
    return tokens
