"""What the planned Trainer refuses on all ranks, and what all hear of that fails on one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import in_a_world
from pool import TIMEOUT, Pool
from trainers import PLANS, arguments, model, rows, transformers

from hexiseq_triton.context import init
from hexiseq_triton.errors import HexiSeqError


def nothing(*_: Any, **__: Any) -> Any:
    """Stand for a function that is not called."""


def refused(rank: int, changed: dict[str, Any], extra: dict[str, Any], wrong_rank: int) -> str:
    """Worker: what a Trainer raises that is asked for something unsupported on one rank."""
    in_a_world(rank)
    from hexiseq_triton.integrations.hf_trainer import PlannedTrainer

    if rank != wrong_rank:
        changed = {"output_dir": changed["output_dir"]}
        extra = {}
    args = transformers.TrainingArguments(**arguments(Path(), 1, 1) | changed)
    with init(PLANS["uneven"], device="cpu", timeout=TIMEOUT) as context:
        try:
            trainer = PlannedTrainer(
                model(), args=args, train_dataset=rows(6, 0), context=context, **extra
            )
            trainer.train()
        except HexiSeqError as error:
            return f"{type(error).__name__}: {error}"
    return "accepted"


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "compute_metrics needs logits": ({}, {"compute_metrics": nothing}),
    "only plain cross entropy": ({}, {"compute_loss_func": nothing}),
    "only plain cross entropy works": ({"label_smoothing_factor": 0.1}, {}),
    "neftune_noise_alpha is set": ({"neftune_noise_alpha": 5.0}, {}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_would_be_dropped_is_refused_on_all_ranks(
    pool: Pool, tmp_path: Path, message: str
) -> None:
    changed, extra = REFUSED[message]
    found = pool.run(refused, {"output_dir": str(tmp_path)} | changed, extra, 1)
    assert len(set(found)) == 1
    assert found[0].startswith(f"InputError: rank 1: {message}")


class Tripled(transformers.Trainer):  # type: ignore[misc]
    """A Trainer with another loss."""

    def compute_loss(self, *given: Any, **named: Any) -> Any:
        return 3 * super().compute_loss(*given, **named)


def other_loss(rank: int, by: str, out: str) -> str:
    """Worker: what a trainer or a model raises whose loss is not that of the next token."""
    in_a_world(rank)
    from hexiseq_triton.integrations.hf_trainer import PlannedTrainer, PlannedTrainerMixin

    class PlannedTripled(PlannedTrainerMixin, Tripled):
        pass

    trained = model()
    if by == "model":
        trained = transformers.LlamaForTokenClassification(trained.config)
    trainer_class = PlannedTripled if by == "trainer" else PlannedTrainer
    args = transformers.TrainingArguments(**arguments(Path(out), 1, 1))
    with init(PLANS["uneven"], device="cpu", timeout=TIMEOUT) as context:
        try:
            trainer_class(trained, args=args, train_dataset=rows(6, 0), context=context)
        except HexiSeqError as error:
            return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("by", "message"),
    [
        ("trainer", "Tripled computes its own loss"),
        ("model", "LlamaForTokenClassification has the loss of ForTokenClassification"),
    ],
)
def test_another_loss_is_refused(pool: Pool, tmp_path: Path, by: str, message: str) -> None:
    for found in pool.run(other_loss, by, str(tmp_path)):
        assert found.startswith(f"rank 0: {message}")


def spoiled(rank: int, where: str, options: dict[str, Any]) -> tuple[str, float]:
    """Worker: what a run raises, and after how long, that fails on one rank or in one replica."""
    in_a_world(rank)
    from hexiseq_triton.integrations.hf_trainer import PlannedTrainer

    with init(PLANS["uneven"], device="cpu", timeout=TIMEOUT) as context:

        def collate(given: list[dict[str, list[int]]]) -> dict[str, Any]:
            if where == "rank" and context.rank == 1:
                raise OSError("a row cannot be read")
            batch: dict[str, Any] = {
                name: torch.tensor([row[name] for row in given]) for name in given[0]
            }
            if where == "replica" and context.replica == 1:
                batch["attention_mask"] = torch.zeros_like(batch["input_ids"])
            return batch

        trainer = PlannedTrainer(
            model(),
            args=transformers.TrainingArguments(**options),
            train_dataset=rows(18, 0),
            data_collator=collate,
            context=context,
        )
        began = time.monotonic()
        try:
            trainer.train()
        except (HexiSeqError, OSError) as error:
            return str(error), time.monotonic() - began
    return "accepted", 0.0


@pytest.mark.parametrize(
    ("where", "message"),
    [("rank", "a row cannot be read"), ("replica", "attention_mask hides tokens")],
)
def test_all_replicas_hear_soon_of_a_batch_that_fails(
    pool: Pool, tmp_path: Path, where: str, message: str
) -> None:
    for found, seconds in pool.run(spoiled, where, arguments(tmp_path, 1, 1)):
        assert message in found
        assert seconds < TIMEOUT.total_seconds() / 2
