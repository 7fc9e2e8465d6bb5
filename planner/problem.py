"""The planning problem, and the layouts that answer it: replicas of groups of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from hexiseq_triton.errors import ConfigError
from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.plans import Exchange, ExchangePlan
from hexiseq_triton.planner.rates import MEMORY_LIMIT_SHARE, Floats, Rates, rates_of
from hexiseq_triton.planner.workload import Workload

Arrangement = Literal["balanced", "contiguous"]
"""How tokens are dealt to groups; see `plans.ExchangePlan`."""


@dataclass(frozen=True)
class Group:
    """A head-parallel group: its ranks, and the tokens and query heads of each."""

    ranks: tuple[int, ...]
    tokens: tuple[int, ...]
    heads: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens)


@dataclass(frozen=True)
class Replica:
    """Groups that train on the same sequences, in nesting order, outermost first.

    The `sequences` of one pass form one stream, whose tokens the groups share.
    """

    groups: tuple[Group, ...]
    sequences: int = 1

    @property
    def num_tokens(self) -> int:
        return sum(group.num_tokens for group in self.groups)


@dataclass(frozen=True)
class Layout:
    """Who holds what in each of a step's `accumulation` passes.

    Ranks in no group are idle: they hold their shard of the states and no tokens. `exchange` is how
    KV travels between groups; "routes" is the runtime's.
    """

    name: str
    replicas: tuple[Replica, ...]
    accumulation: int
    arrangement: Arrangement = "balanced"
    exchange: Exchange = "routes"

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of all replicas, in order."""
        return tuple(group for replica in self.replicas for group in replica.groups)

    @property
    def executable(self) -> bool:
        """Whether the runtime can carry it out."""
        return self.exchange == "routes"


@dataclass(frozen=True)
class Problem:
    """What is planned for. Every layout is judged against one of these.

    `memory_limit_share` is how much of each GPU's memory may be used.
    """

    cluster: Cluster
    model: ModelSpec
    workload: Workload
    exchange: ExchangePlan
    memory_limit_share: float = MEMORY_LIMIT_SHARE

    @cached_property
    def rates(self) -> Rates:
        workload = self.workload
        return rates_of(
            self.cluster,
            self.model.head_dim,
            document_tokens=max(workload.document_lengths),
            rank_tokens=workload.step_tokens // self.cluster.world_size,
            memory_limit_share=self.memory_limit_share,
        )

    @cached_property
    def work(self) -> Work:
        return Work.of(self.model)

    @cached_property
    def seconds_per_token(self) -> tuple[Floats, Floats]:
        """Seconds [2, ranks], forward and backward: token-wise work, and attention of one head."""
        rates, pairs = self.rates, self.work.attention_per_pair * self.workload.pairs_per_token
        token_wise = self.work.linear_per_token * np.array(
            [1 / rates.gemm_forward, Work.BACKWARD_LINEAR / rates.gemm_backward]
        )
        attention = pairs * np.array(
            [1 / rates.attention_forward, Work.BACKWARD_ATTENTION / rates.attention_backward]
        )
        return token_wise, attention


@dataclass(frozen=True)
class Work:
    """FLOPs of one forward pass through one layer; `logits` through the output matrix, once."""

    linear_per_token: float
    attention_per_pair: float
    """For one (query, key) pair of one head."""
    logits_per_token: float

    BACKWARD_LINEAR = 2.0
    """Backward makes the gradients of inputs and of weights: two products for each of forward's."""
    BACKWARD_ATTENTION = 2.5
    """Backward recomputes the scores: five products for forward's two."""

    @classmethod
    def of(cls, model: ModelSpec) -> Work:
        return cls(
            linear_per_token=2.0 * model.layer_matrix_parameters,
            attention_per_pair=4.0 * model.head_dim,
            logits_per_token=2.0 * model.hidden * model.vocab,
        )


def nested(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Return groups in nesting order: most tokens outermost, ties by first rank.

    Under a causal mask an outer group fetches all KV of an inner one, an inner group half of an
    outer one's. With the large groups outside, the fewest rows travel.
    """
    return tuple(sorted(groups, key=lambda group: (-group.num_tokens, group.ranks)))


def checked_memory_limit_share(share: float) -> float:
    """Return the share of a GPU's memory that a user lets a plan take.

    Raises:
        ConfigError: if it is none. A problem itself may lift the limit, as ablations do.
    """
    if not 0 < share <= 1:
        raise ConfigError(f"memory_limit_share is {share}; it is above 0 and up to 1")
    return share
