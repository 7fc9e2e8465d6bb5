"""The plan: who owns which tokens and which attention heads. A plan is data.

A plan holds data-parallel replicas; a replica holds head-parallel (HP) groups; a group holds ranks.
Group g owns L_g tokens of its replica's stream. Rank d of it holds `tokens` of them in the
token-wise layers and, after an all-to-all, the query heads [a, b) of all L_g tokens in attention.
The order of the groups is their nesting order: the first takes the outermost pieces of the stream.

`Plan.validate` checks a plan in integers (`checks`) and shares no code with the search.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, field
from pathlib import Path
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from hexiseq_triton.errors import ConfigError, PlanError
from hexiseq_triton.planner.checks import PLAN_VERSION, check_plan
from hexiseq_triton.planner.files import FILE_CONFIG, build, in_a_line, read_mapping
from hexiseq_triton.planner.heads import HeadRange, kv_heads_of


@in_a_line
@dataclass(frozen=True, config=FILE_CONFIG)
class RankShare:
    """One rank's share of its HP group.

    `memory_bytes` is predicted, `memory_limit_bytes` what the rank may use; `seconds` is the
    predicted busy time of one step. All three are None in plans written by hand.
    """

    rank: int
    tokens: int
    q_heads: HeadRange
    kv_heads: HeadRange
    gpu: str | None = None
    node: str | None = None
    memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    seconds: float | None = None

    @property
    def num_q_heads(self) -> int:
        return self.q_heads[1] - self.q_heads[0]

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads[1] - self.kv_heads[0]


@in_a_line
@dataclass(frozen=True, config=FILE_CONFIG)
class IdleRank:
    """A rank without tokens and heads, and where it stands."""

    rank: int
    gpu: str | None = None
    node: str | None = None


@in_a_line
@dataclass(frozen=True, config=FILE_CONFIG)
class GroupPlan:
    """A head-parallel group: its ranks hold every query head once, over the group's tokens."""

    ranks: tuple[RankShare, ...]

    @property
    def tokens(self) -> int:
        return sum(share.tokens for share in self.ranks)


@in_a_line
@dataclass(frozen=True, config=FILE_CONFIG)
class ReplicaPlan:
    """HP groups that train on the same sequences; all its sequences form one stream a pass."""

    groups: tuple[GroupPlan, ...]
    sequences: int = 1

    @property
    def tokens(self) -> int:
        return sum(group.tokens for group in self.groups)

    @property
    def shares(self) -> list[RankShare]:
        return [share for group in self.groups for share in group.ranks]


Arrangement = Literal["balanced", "contiguous"]
Exchange = Literal["routes", "rotation", "double_ring", "all_gather"]
"""How KV travels between groups; see `planner.exchange`. The runtime has routes."""
Order = Literal["ring", "spread"]
"""One other group's keys after the other's, or some of every group's at any time."""


@in_a_line
@dataclass(frozen=True, config=FILE_CONFIG)
class ExchangePlan:
    """How KV travels between groups.

    `arrangement` "balanced" deals tokens so that every group gets its share of attention work
    (mirrored pieces for one causal document, chunks for packed ones); "contiguous" gives each
    group one run of tokens, as plain ring attention does. A transfer carries at most
    `chunk_tokens` rows. The rows that a rank works through in `window` chunks are one round: while
    it works on one, the next is under way. `order` is that of `planner.schedule`; left out, it is
    "spread" in replicas on several nodes, so that NICs are always at work, and otherwise "ring".
    """

    arrangement: Arrangement = "balanced"
    chunk_tokens: int = 8192
    window: int = 2
    mode: Exchange = "routes"
    order: Order | None = None

    def spreads(self, nodes: Iterable[object]) -> bool:
        """Return whether the order is "spread" in a replica whose ranks stand on these nodes."""
        return self.order == "spread" or (self.order is None and len(set(nodes)) > 1)


@dataclass(frozen=True, config=FILE_CONFIG)
class Prediction:
    """What one optimizer step of the plan is expected to take."""

    step_seconds: float
    tokens_per_second: float


@dataclass(frozen=True, config=FILE_CONFIG)
class BaselineResult:
    """A layout the plan was compared with; `step_seconds` is None where `reason` forbids it.

    One that is not `executable` exchanges KV in a way that the runtime has not.
    """

    step_seconds: float | None = None
    reason: str | None = None
    executable: bool = True


@in_a_line
@dataclass(frozen=True, config=FILE_CONFIG)
class Split:
    """One HP group, by hand: tokens and query heads per rank, and optionally the ranks' numbers."""

    tokens: tuple[int, ...]
    heads: tuple[int, ...]
    ranks: tuple[int, ...] | None = None


@in_a_line
@dataclass(frozen=True, config=FILE_CONFIG)
class Plan:
    """Who owns what, what it is predicted to cost, and what it was compared with.

    `gap` is how far the step may be from the best: `step_seconds / lower_bound_seconds - 1`;
    `gap_parts` says where it comes from and adds up to it (`gap.gap_parts`).
    `recompute` is what the memory figures assume of training; None in plans written by hand.
    `idle` are the ranks outside all groups; plans written by hand may leave them out.
    `device_names` holds, for each `gpu` of a rank, the names under which CUDA may report it; the
    runtime refuses other devices. A GPU without names runs anywhere.
    `notes` say what a reader should know of how the plan was made. The runtime refuses a plan that
    is not `executable`; its notes say why.
    """

    world_size: int
    seq_len: int
    num_heads: int
    num_kv_heads: int
    replicas: tuple[ReplicaPlan, ...]
    idle: tuple[IdleRank, ...] = ()
    head_dim: int | None = None
    causal: bool = True
    accumulation: int = 1
    recompute: Literal["full", "none"] | None = None
    exchange: ExchangePlan = field(default_factory=ExchangePlan)
    strategy: str = "by hand"
    executable: bool = True
    notes: tuple[str, ...] = ()
    predicted: Prediction | None = None
    lower_bound_seconds: float | None = None
    gap: float | None = None
    gap_parts: dict[str, float] = field(default_factory=dict)
    baselines: dict[str, BaselineResult] = field(default_factory=dict)
    device_names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    made_from: dict[str, str] = field(default_factory=dict)
    version: int = PLAN_VERSION

    # ---------------------------------------------------------------- made by hand

    @classmethod
    def from_splits(
        cls,
        *replicas: Sequence[Split],
        num_kv_heads: int | None = None,
        sequences: Sequence[int] | None = None,
        world_size: int | None = None,
        causal: bool = True,
        exchange: ExchangePlan | None = None,
        head_dim: int | None = None,
        accumulation: int = 1,
    ) -> Plan:
        """Write a plan by hand; ranks count up from 0 where a split names none.

        Args:
            replicas: for each replica its HP groups, in nesting order.
            num_kv_heads: key/value heads of the model; as many as query heads if left out.
            sequences: sequences a pass for each replica; 1 each if left out.
            world_size: ranks in all; more than the splits name leaves the others idle.

        Raises:
            PlanError: if the splits contradict each other; the message says where.
        """
        if not replicas or not all(replicas):
            raise PlanError("from_splits needs at least one replica, each with at least one Split")
        num_heads = sum(replicas[0][0].heads)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise PlanError(
                f"{num_heads} query heads over {num_kv_heads} KV heads: num_kv_heads must divide "
                "the query heads"
            )
        plans = _replicas_by_hand(replicas, sequences, num_heads // num_kv_heads)
        used = 1 + max(share.rank for replica in plans for share in replica.shares)
        plan = cls(
            world_size=used if world_size is None else world_size,
            seq_len=plans[0].tokens // max(plans[0].sequences, 1),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            replicas=tuple(plans),
            head_dim=head_dim,
            causal=causal,
            accumulation=accumulation,
            exchange=exchange or ExchangePlan(),
        )
        plan.validate()
        return plan

    # ---------------------------------------------------------------- facts

    @property
    def q_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def global_batch(self) -> int:
        """Sequences in one optimizer step."""
        return self.accumulation * sum(replica.sequences for replica in self.replicas)

    @property
    def shares(self) -> list[RankShare]:
        """Every rank that works, in replica, group and rank order."""
        return [share for replica in self.replicas for share in replica.shares]

    def replica_of(self, rank: int) -> int | None:
        """Return the index of the replica a rank belongs to; None for an idle rank."""
        for index, replica in enumerate(self.replicas):
            if any(share.rank == rank for share in replica.shares):
                return index
        return None

    def validate(self) -> None:
        """Check the plan in integers.

        Raises:
            PlanError: naming the replica, group and rank, what it holds and what it should.
        """
        check_plan(self)

    def check_executable(self) -> None:
        """Check that the runtime can carry the plan out.

        Raises:
            PlanError: with the plan's notes, if it was made only to be looked at.
        """
        if not self.executable:
            raise PlanError(f"the plan cannot be carried out: {'; '.join(self.notes)}")

    # ---------------------------------------------------------------- file

    def to_json(self) -> str:
        """Return the plan's file: sorted keys, floats at 9 digits, a digest of the content."""
        content = _rounded(asdict(self))
        return json.dumps(content | {"digest": _digest(content)}, sort_keys=True, indent=1) + "\n"

    @property
    def digest(self) -> str:
        """A hash of the whole content; equal plans have equal digests."""
        return _digest(_rounded(asdict(self)))

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file and check it.

        Raises:
            ConfigError: if the file cannot be read or a field is wrong.
            PlanError: if the file was edited after it was written, or contradicts itself.
        """
        content = read_mapping(path)
        digest = content.pop("digest", None)
        if "version" not in content:
            raise ConfigError(
                f"{path}: is no plan: it has no version, and begins with "
                f"{', '.join(map(str, list(content)[:3])) or 'nothing'}; `hexiseq plan --out` "
                "writes plans"
            )
        if content.get("version") != PLAN_VERSION:
            raise ConfigError(
                f"{path}: version is {content.get('version')!r}; this release reads plans of "
                f"version {PLAN_VERSION}"
            )
        if digest != _digest(content):
            raise PlanError(
                f"{path}: was edited after it was written (digest {str(digest)[:12]}, content "
                f"{_digest(content)[:12]}); write plans with `hexiseq plan` or Plan.from_splits"
            )
        plan = build(cls, content, str(path))
        plan.validate()
        return plan


def _replicas_by_hand(
    replicas: Sequence[Sequence[Split]], sequences: Sequence[int] | None, q_per_kv: int
) -> list[ReplicaPlan]:
    counts = sequences or [1] * len(replicas)
    if len(counts) != len(replicas):
        raise PlanError(f"sequences has {len(counts)} entries for {len(replicas)} replicas")
    next_rank = 0
    plans = []
    for splits, count in zip(replicas, counts, strict=True):
        groups = []
        for split in splits:
            shares, next_rank = _shares(split, q_per_kv, next_rank)
            groups.append(GroupPlan(shares))
        plans.append(ReplicaPlan(tuple(groups), count))
    return plans


def _shares(split: Split, q_per_kv: int, next_rank: int) -> tuple[tuple[RankShare, ...], int]:
    """Return the shares of one hand-written group and the next free rank."""
    ranks = split.ranks
    if ranks is None:
        ranks = tuple(range(next_rank, next_rank + len(split.tokens)))
    if not len(ranks) == len(split.tokens) == len(split.heads):
        raise PlanError(
            f"a Split has {len(split.tokens)} token counts, {len(split.heads)} head counts and "
            f"{len(ranks)} ranks; it needs one of each per rank"
        )
    shares = []
    start = 0
    for rank, tokens, count in zip(ranks, split.tokens, split.heads, strict=True):
        q_heads = (start, start + count)
        shares.append(RankShare(rank, tokens, q_heads, kv_heads_of(q_heads, q_per_kv)))
        start += count
    return tuple(shares), max([next_rank, *(rank + 1 for rank in ranks)])


def _rounded(value: Any) -> Any:
    """Return JSON content with tuples as lists and floats at 9 significant digits."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def _digest(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
