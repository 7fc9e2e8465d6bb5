"""What the ranks of a replica agree on before they attend: how, and over which batch.

Transfers of calls that differ may well have the same sizes, and nothing else would tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

import torch

from hexiseq_triton.agreement import listed
from hexiseq_triton.errors import InputError
from hexiseq_triton.layout import BatchLayout


class CallAgreement:
    """One rank's attention calls, held against those of the other ranks of its replica.

    Args:
        rank: this rank of the plan.
        replica: its replica; None for an idle rank, which agrees with nobody.
        ranks: the ranks of the replica.
        gather: returns every rank's value for a name, in the order of `ranks`.
    """

    def __init__(
        self,
        rank: int,
        replica: int | None,
        ranks: Sequence[int],
        gather: Callable[[str, str], list[str]],
    ) -> None:
        self._rank, self._replica, self._ranks = rank, replica, ranks
        self._gather = gather
        self._kind: tuple[torch.dtype, int] | None = None
        self._agreed_options: set[str] = set()
        self._agreed_layout: BatchLayout | None = None
        self._batches = count()

    def agree_on_options(self, dtype: torch.dtype, head_dim: int, options: str) -> None:
        """Pin dtype and head dim at the first call; agree on each new set of options."""
        if self._replica is None:
            return
        if self._kind is not None and self._kind != (dtype, head_dim):
            raise InputError(
                f"attention got {dtype} with head_dim {head_dim} on rank {self._rank}; this "
                f"context began with {self._kind[0]} and {self._kind[1]}: use one context for each"
            )
        if options in self._agreed_options:
            return
        called = f"{dtype}, head_dim {head_dim}, {options}"
        self._check_alike("call", called, "ranks call attention differently")
        self._kind = (dtype, head_dim)
        self._agreed_options.add(options)

    def next_batch(self) -> int:
        """Return the number of the batch that the replica shards next."""
        return next(self._batches)

    def agree_on_batch(self, layout: BatchLayout) -> None:
        """Find ranks that attend over another batch, whenever this rank goes on to one."""
        if layout is self._agreed_layout or len(self._ranks) == 1:
            return
        self._check_alike(
            "batch",
            layout.name,
            f"the ranks of replica {self._replica} attend over different batches; call attention "
            "with the layout of the same batch on all of them",
        )
        self._agreed_layout = layout

    def _check_alike(self, name: str, value: str, problem: str) -> None:
        answers = self._gather(name, value)
        if len(set(answers)) > 1:
            raise InputError(f"{problem}\n{listed(self._ranks, answers)}")
