"""The planning problem, and the layouts that answer it: groups of ranks with tokens and heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.plans import ExchangePlan
from hexiseq_triton.planner.rates import Rates, rates_of
from hexiseq_triton.planner.workload import Workload


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
class Layout:
    """One replica over all ranks: its groups in nesting order, outermost first."""

    name: str
    groups: tuple[Group, ...]
    arrangement: Literal["balanced", "contiguous"] = "balanced"


@dataclass(frozen=True)
class Problem:
    """What is planned for. Every layout is judged against one of these."""

    cluster: Cluster
    model: ModelSpec
    workload: Workload
    exchange: ExchangePlan

    @cached_property
    def rates(self) -> Rates:
        return rates_of(self.cluster)

    @cached_property
    def work(self) -> Work:
        return Work.of(self.model)


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
