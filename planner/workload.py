"""What one training step has to do."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from hexiseq_triton.planner.files import FILE_CONFIG

Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, config=FILE_CONFIG)
class Workload:
    """Sequences of `seq_len` tokens, `global_batch` of them a step.

    A step runs `accumulation` passes; the sequences of one pass form one packed stream. Left out,
    a pass holds one sequence. `recompute` "full" keeps only each layer's input for backward.
    """

    seq_len: Count
    global_batch: Count = 8
    accumulation: Count = Field(default_factory=lambda given: given["global_batch"])
    dtype: Literal["bf16"] = "bf16"
    recompute: Literal["full", "none"] = "full"
    causal: bool = True

    def __post_init__(self) -> None:
        if self.global_batch % self.accumulation:
            raise ValueError(
                f"global_batch {self.global_batch} does not divide by accumulation "
                f"{self.accumulation}; every pass takes the same number of sequences"
            )

    @property
    def sequences(self) -> int:
        """Sequences in one pass."""
        return self.global_batch // self.accumulation

    @property
    def stream_tokens(self) -> int:
        """Tokens in one pass."""
        return self.sequences * self.seq_len

    @property
    def pairs_per_token(self) -> float:
        """(query, key) pairs a token costs on average, in the balanced arrangement."""
        return (self.seq_len + 1) / 2 if self.causal else float(self.seq_len)
