"""How many tokens' KV each group fetches of each other group, as sums the cost model needs.

`Nested` knows the pattern of one replica after another and never writes the matrix down: 1,024
groups cost little more than one. `Counted` holds the matrix, for documents counted one by one.
Groups are numbered over all replicas, in nesting order; nothing is fetched between replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from hexiseq_triton.planner.rates import Floats, Ints


class Fetches(Protocol):
    """F[i, j]: tokens of group j whose KV each rank of group i fetches."""

    def between(self, receiver: Ints, sender: Ints) -> Floats:
        """Return F for pairs of groups."""

    def received(self) -> Floats:
        """Return sum over j of F[i, j]."""

    def asked(self, holders: Floats) -> Floats:
        """Return sum over i of F[i, j] holders[i, k], [groups, k]."""

    def chunks(self, size: int) -> tuple[Floats, Floats]:
        """Return how many transfers of at most `size` tokens each group gets, and gives."""


@dataclass(frozen=True)
class Counted:
    """F written down, [groups, groups]."""

    tokens: Floats

    def between(self, receiver: Ints, sender: Ints) -> Floats:
        result: Floats = self.tokens[receiver, sender]
        return result

    def received(self) -> Floats:
        result: Floats = self.tokens.sum(axis=1)
        return result

    def asked(self, holders: Floats) -> Floats:
        return self.tokens.T @ holders

    def chunks(self, size: int) -> tuple[Floats, Floats]:
        count = np.ceil(self.tokens / size)
        return count.sum(axis=1), count.sum(axis=0)


@dataclass(frozen=True)
class Nested:
    """F[i, j] = to_inner * tokens[j] if j stands after i in its replica, to_outer * if before.

    `to_inner` and `to_outer` are arrays over groups, alike in a replica.
    """

    tokens: Floats
    to_inner: Floats
    to_outer: Floats
    replica: Ints

    def between(self, receiver: Ints, sender: Ints) -> Floats:
        share = np.where(sender > receiver, self.to_inner[receiver], self.to_outer[receiver])
        moves = (receiver != sender) & (self.replica[receiver] == self.replica[sender])
        result: Floats = moves * share * self.tokens[sender]
        return result

    def received(self) -> Floats:
        outer, inner = self.around(self.tokens)
        return self.to_inner * inner + self.to_outer * outer

    def asked(self, holders: Floats) -> Floats:
        outer, inner = self.around(holders)
        share = self.to_inner[:, None] * outer + self.to_outer[:, None] * inner
        return self.tokens[:, None] * share

    def chunks(self, size: int) -> tuple[Floats, Floats]:
        to_inner = np.ceil(self.to_inner * self.tokens / size)
        to_outer = np.ceil(self.to_outer * self.tokens / size)
        outer, inner = self.around(np.ones(len(self.tokens)))
        arrivals = self.around(to_inner)[1] + self.around(to_outer)[0]
        return arrivals, to_inner * outer + to_outer * inner

    def around(self, values: Floats) -> tuple[Floats, Floats]:
        """Return sums of `values` over the groups before and after each one in its replica."""
        first, last = self._ends
        through = np.cumsum(values, axis=0)
        before = through - values
        outer = before - before[first]
        return outer, through[last] - through

    @cached_property
    def _ends(self) -> tuple[Ints, Ints]:
        """The first and the last group of each one's replica."""
        sizes = np.bincount(self.replica)
        first = np.repeat(np.cumsum(sizes) - sizes, sizes)
        return first, first + np.repeat(sizes, sizes) - 1
