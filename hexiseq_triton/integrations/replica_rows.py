"""Which rows of a data set each replica reads in each pass, the same on all ranks of a replica.

A pass deals consecutive rows of the epoch's order: the first replica's, the second's, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, Sampler

from hexiseq_triton.shard import IGNORED_LABEL


class ReplicaRows(Sampler[list[int]]):
    """One replica's rows of each pass, for a DataLoader's `batch_sampler`.

    Attributes:
        num_rows: rows of the data set.
        order: makes the order of an epoch's rows; as they stand if not set.
        ending: what becomes of a last pass with too few rows. "repeat" fills it with the epoch's
            first rows; "drop" leaves it out; "short" deals what is there, and a replica that gets
            none reads one that does not count.
    """

    def __init__(self, num_rows: int, rows_of_replicas: Sequence[int], replica: int) -> None:
        self.num_rows = num_rows
        self.order: Callable[[], Sequence[int]] = lambda: range(num_rows)
        self.ending: Literal["repeat", "drop", "short"] = "short"
        self._a_pass = sum(rows_of_replicas)
        self._first = sum(rows_of_replicas[:replica])
        self._count = rows_of_replicas[replica]

    def __len__(self) -> int:
        """Return the passes of an epoch, the same for every replica."""
        if self.ending == "drop":
            return self.num_rows // self._a_pass
        return -(-self.num_rows // self._a_pass)

    @property
    def num_counted(self) -> int:
        """How many of the passes hold a row of this replica that counts."""
        full, rest = divmod(self.num_rows, self._a_pass)
        return full + (rest > self._first)

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order()
        for number in range(len(self)):
            first = number * self._a_pass + self._first
            wanted = range(first, first + self._count)
            if self.ending == "short":
                yield [order[row] for row in wanted if row < self.num_rows] or [order[0]]
            else:
                yield [order[row % self.num_rows] for row in wanted]


class EvaluationLoader(DataLoader[Any]):
    """A loader of `ReplicaRows` in which a row that does not count has no labels."""

    def __iter__(self) -> Any:
        rows = self.batch_sampler
        assert isinstance(rows, ReplicaRows)
        for number, batch in enumerate(super().__iter__()):
            if number < rows.num_counted:
                yield batch
            else:
                yield batch | {"labels": torch.full_like(batch["input_ids"], IGNORED_LABEL)}


def shuffled(num_rows: int, seed: int, epoch: int) -> list[int]:
    """Return the rows in the random order of an epoch."""
    generator = torch.Generator("cpu").manual_seed(seed + epoch)
    order: list[int] = torch.randperm(num_rows, generator=generator, device="cpu").tolist()
    return order
