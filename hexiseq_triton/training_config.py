"""What to train and how: the file that `hexiseq train --config` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from hexiseq_triton.planner.files import FILE_CONFIG, Count, Positive, build, read_mapping


@dataclass(frozen=True, config=FILE_CONFIG)
class CorpusOptions:
    """Which files are the documents; left out, the standard library of the running Python."""

    folder: str | None = None
    pattern: str = "*.py"
    max_document_tokens: Count | None = None


@dataclass(frozen=True, config=FILE_CONFIG)
class TrainingConfig:
    """One training run.

    `model` is a preset, a YAML file or a Hugging Face config.json. The learning rate rises over
    `warmup_steps` and then stays. `dtype` is that of activations and gathered parameters; the
    parameters themselves, their gradients and Adam's state are fp32. `recompute` "full" keeps only
    each layer's input for backward; left out, it is what the plan's memory figures assume.

    `out` may hold no other run. A checkpoint is written every `checkpoint_every` steps and after
    the last; left out, never. `resume` goes on from the newest one in `out`, at the token that its
    run came to; `steps` counts from the beginning of the run.
    """

    model: str
    steps: Count
    lr: Positive
    seed: int = 0
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    max_grad_norm: Positive | None = None
    rope_theta: Positive = 10000.0
    dtype: Literal["fp32", "bf16"] = "fp32"
    recompute: Literal["full", "none"] | None = None
    out: str = "train_out"
    checkpoint_every: Count | None = None
    resume: bool = False
    timeout_seconds: Positive = 600.0
    corpus: CorpusOptions = Field(default_factory=CorpusOptions)

    @classmethod
    def load(cls, path: str | Path) -> TrainingConfig:
        """Read a training file.

        Raises:
            ConfigError: naming the file, the field, its value, and what fits.
        """
        return build(cls, read_mapping(path), str(path))

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return self.lr * min(1.0, (step + 1) / (self.warmup_steps + 1))
