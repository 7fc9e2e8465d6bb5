"""What one training step has to do."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from hexiseq_triton.planner.files import FILE_CONFIG, Count, in_a_line

MOST_TOKENS, MOST_SEQUENCES = 2**40, 2**20
"""Of a sequence, and of a step: more is a slip, and products of more would overflow."""


@in_a_line
@dataclass(frozen=True, config=FILE_CONFIG)
class Workload:
    """Sequences of `seq_len` tokens, `global_batch` of them a step.

    A step runs `accumulation` passes; the sequences of one pass are dealt to replicas, and those of
    one replica form one packed stream. Left out, the planner chooses. `documents` are the lengths
    of the documents in a sequence, alike in all of them; left out, a sequence is one document.
    `recompute` "full" keeps only each layer's input for backward.
    """

    seq_len: Annotated[Count, Field(le=MOST_TOKENS)]
    global_batch: Annotated[Count, Field(le=MOST_SEQUENCES)] = 8
    accumulation: Count | None = None
    dtype: Literal["bf16"] = "bf16"
    recompute: Literal["full", "none"] = "full"
    causal: bool = True
    documents: tuple[Count, ...] | None = None

    def __post_init__(self) -> None:
        if self.accumulation is not None and self.global_batch % self.accumulation:
            raise ValueError(
                f"global_batch {self.global_batch} does not divide by accumulation "
                f"{self.accumulation}; every pass takes the same number of sequences"
            )
        if self.documents is not None and sum(self.documents) != self.seq_len:
            raise ValueError(
                f"documents hold {sum(self.documents)} tokens and seq_len is {self.seq_len}; the "
                "documents of one sequence must fill it"
            )

    @property
    def accumulations(self) -> tuple[int, ...]:
        """The passes a step may have, fewest first."""
        if self.accumulation is not None:
            return (self.accumulation,)
        return tuple(n for n in range(1, self.global_batch + 1) if not self.global_batch % n)

    @property
    def step_tokens(self) -> int:
        """Tokens in one step."""
        return self.global_batch * self.seq_len

    @property
    def document_lengths(self) -> tuple[int, ...]:
        """Documents of one sequence."""
        return self.documents or (self.seq_len,)

    @property
    def pairs_per_token(self) -> float:
        """(query, key) pairs that a token costs on average, for each head."""
        lengths = self.document_lengths
        pairs = sum(n * (n + 1) // 2 if self.causal else n * n for n in lengths)
        return pairs / self.seq_len
