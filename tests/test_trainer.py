"""transformers' Trainer and TRL's SFTTrainer under uneven plans equal themselves in one process."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import in_a_world
from pool import TIMEOUT, Pool
from trainers import PLANS, ROW, VOCAB, arguments, model, rows, transformers

from hexiseq_triton.context import init
from hexiseq_triton.integrations.replica_rows import EvaluationLoader, ReplicaRows, shuffled
from hexiseq_triton.planner import Plan, Split


def logged(trainer: Any) -> dict[str, list[float]]:
    """Return what the Trainer logged, step by step."""
    history = trainer.state.log_history
    return {
        name: [line[name] for line in history if name in line] for name in ("loss", "grad_norm")
    }


def sharding(trainer_class: type, options: dict[str, Any]) -> type:
    """Let accelerate shard with FSDP2 on CPUs too, where it offers DDP alone."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    if not options.get("fsdp") or not options["use_cpu"]:
        return trainer_class

    class Sharded(trainer_class):  # type: ignore[misc]
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            state = self.accelerator.state
            state.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            self.is_fsdp_enabled = True

    return Sharded


WRAPPERS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp2": {
        "fsdp": True,
        "fsdp_config": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"},
    },
}
SAVED = WRAPPERS | {"fsdp2, whole": {"fsdp": True, "fsdp_config": {"version": 2}}}
"""The wrappers, and that FSDP2 by default saves everything from its first rank."""


def planned(
    rank: int, plan: Plan, options: dict[str, Any], resume: bool = False
) -> dict[str, list[float]]:
    """Worker: train under a plan."""
    in_a_world(rank)
    from hexiseq_triton.integrations.hf_trainer import PlannedTrainer

    with init(plan, device="cpu" if options["use_cpu"] else None, timeout=TIMEOUT) as context:
        trainer = sharding(PlannedTrainer, options)(
            model(),
            args=transformers.TrainingArguments(**options),
            train_dataset=rows(18, 0),
            context=context,
        )
        trainer.train(resume_from_checkpoint=resume or None)
        return logged(trainer)


def in_order(trainer_class: type, accumulation: int, steps: int, a_pass: int = 3) -> type:
    """Let an unmodified Trainer read, `a_pass` rows a pass, what all replicas together read."""

    class InOrder(trainer_class):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            loader = super().get_train_dataloader()
            count = len(loader.dataset)
            whole = count // a_pass * a_pass
            epochs = (shuffled(count, 3, epoch)[:whole] for epoch in range(99))
            wanted = a_pass * accumulation * steps
            order = list(itertools.islice(itertools.chain.from_iterable(epochs), wanted))
            return torch.utils.data.DataLoader(
                loader.dataset, batch_size=a_pass, sampler=order, collate_fn=loader.collate_fn
            )

    return InOrder


def alone(options: dict[str, Any], a_pass: int = 3) -> dict[str, list[float]]:
    """Train in this process with the unmodified Trainer."""
    accumulation, steps = options["gradient_accumulation_steps"], options["max_steps"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = in_order(transformers.Trainer, accumulation, steps, a_pass)(
            model(), args=transformers.TrainingArguments(**options), train_dataset=rows(18, 0)
        )
        trainer.train()
    return logged(trainer)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_trainer_equals_itself_in_one_process(
    pool: Pool, tmp_path: Path, wrapper: str, accumulation: int
) -> None:
    options = arguments(tmp_path, accumulation, 3)
    expected = alone(options)
    for found in pool.run(planned, PLANS["uneven"], options | WRAPPERS[wrapper]):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("wrapper", SAVED)
def test_a_resumed_run_goes_on_with_the_next_rows(pool: Pool, tmp_path: Path, wrapper: str) -> None:
    """Six passes an epoch make two steps of three; the run is cut after step 3, inside epoch 2."""
    saving = {"save_strategy": "steps", "save_steps": 3}
    options = arguments(tmp_path, 3, 5, **saving, **SAVED[wrapper])
    whole = pool.run(planned, PLANS["uneven"], options)[0]["loss"]
    (tmp_path / "checkpoint-5").rename(tmp_path / "last")
    for plan in PLANS.values():
        resumed = pool.run(planned, plan, options, True)[0]["loss"]
        assert resumed[3:] == pytest.approx(whole[3:], rel=1e-5)
        (tmp_path / "checkpoint-5").rename(tmp_path / f"last-{plan.digest[:8]}")


def made_anew(rank: int, options: dict[str, Any]) -> dict[str, list[float]]:
    """Worker: train a model that the Trainer makes itself."""
    in_a_world(rank)
    from hexiseq_triton.integrations.hf_trainer import PlannedTrainer

    with init(PLANS["uneven"], device="cpu", timeout=TIMEOUT) as context:
        trainer = PlannedTrainer(
            model_init=model,
            args=transformers.TrainingArguments(**options),
            train_dataset=rows(18, 0),
            context=context,
        )
        trainer.train()
        return logged(trainer)


def test_a_model_made_by_model_init_attends_under_the_plan(pool: Pool, tmp_path: Path) -> None:
    options = arguments(tmp_path, 1, 2)
    expected = alone(options)["loss"]
    for found in pool.run(made_anew, options):
        assert found["loss"] == pytest.approx(expected, rel=1e-5)


def evaluated(rank: int, plan: Plan, options: dict[str, Any]) -> float:
    """Worker: the loss of an untrained model on seven rows, of which some replicas get more."""
    in_a_world(rank)
    from hexiseq_triton.integrations.hf_trainer import PlannedTrainer

    with init(plan, device="cpu", timeout=TIMEOUT) as context:
        trainer = PlannedTrainer(
            model(), args=transformers.TrainingArguments(**options), context=context
        )
        return float(trainer.evaluate(rows(7, 1))["eval_loss"])


def test_evaluation_counts_every_label_once(pool: Pool, tmp_path: Path) -> None:
    data = rows(7, 1)
    with torch.no_grad():
        logits = model()(torch.tensor([row["input_ids"] for row in data])).logits[:, :-1]
    labels = torch.tensor([row["labels"] for row in data])[:, 1:]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    for found in pool.run(evaluated, PLANS["uneven"], arguments(tmp_path, 1, 1)):
        assert found == pytest.approx(float(expected), rel=1e-5)


# -------------------------------------------------------------------- GPUs

TWO = Plan.from_splits([Split((60, 36), (5, 3))], sequences=[2], num_kv_heads=2)


@pytest.fixture(scope="module")
def gpus() -> Iterator[Pool]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two NVIDIA GPUs or more")
    with Pool(2, backend="nccl") as started:
        yield started


def full_shard(out: Path, states: str, **extra: Any) -> dict[str, Any]:
    sharded = {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": states}}
    saving = {"use_cpu": False, "save_strategy": "steps", "save_steps": 2}
    return arguments(out, 1, 4, **saving, **sharded, **extra)


@pytest.mark.multigpu
@pytest.mark.parametrize("states", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_full_shard_on_gpus_equals_one_process_and_resumes(
    gpus: Pool, tmp_path: Path, states: str
) -> None:
    expected = alone(arguments(tmp_path, 1, 4), a_pass=2)
    options = full_shard(tmp_path, states)
    whole = gpus.run(planned, TWO, options)[0]
    assert whole["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert whole["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
    (tmp_path / "checkpoint-4").rename(tmp_path / "last")
    resumed = gpus.run(planned, TWO, options, True)[0]
    assert resumed["loss"][2:] == pytest.approx(whole["loss"][2:], rel=1e-5)
    if states == "FULL_STATE_DICT":
        first, second = (
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
            for name in ("last", "checkpoint-4")
        )
        for name, weights in first.items():
            torch.testing.assert_close(second[name], weights, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.multigpu
def test_bfloat16_on_gpus_stays_near(gpus: Pool, tmp_path: Path) -> None:
    expected = alone(arguments(tmp_path, 1, 4), a_pass=2)["loss"]
    found = gpus.run(planned, TWO, full_shard(tmp_path, "FULL_STATE_DICT", bf16=True))[0]["loss"]
    assert found == pytest.approx(expected, rel=0.02)


# -------------------------------------------------------------------- TRL


def texts() -> Any:
    """Return a data set of short tokenized documents."""
    import datasets

    draw = random.Random(5)
    lengths = [draw.randrange(2, ROW) for _ in range(70)]
    return datasets.Dataset.from_list(
        [{"input_ids": [draw.randrange(1, VOCAB) for _ in range(length)]} for length in lengths]
    )


def sft(trainer_class: type, options: dict[str, Any], **extra: Any) -> dict[str, list[float]]:
    """Train on packed documents with TRL."""
    from tokenizers import Tokenizer, models
    from trl import SFTConfig

    words = {f"w{i}": i for i in range(1, VOCAB)} | {"pad": 0}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="pad")),
        pad_token="pad",
        eos_token="w1",
    )
    trainer = trainer_class(
        model(),
        args=SFTConfig(packing=True, max_length=ROW, bf16=False, **options),
        train_dataset=texts(),
        processing_class=tokenizer,
        **extra,
    )
    trainer.train()
    return logged(trainer)


def planned_sft(rank: int, plan: Plan, options: dict[str, Any]) -> dict[str, list[float]]:
    """Worker: TRL under a plan."""
    in_a_world(rank)
    from trl import SFTTrainer

    from hexiseq_triton.integrations.hf_trainer import PlannedTrainerMixin

    class PlannedSFTTrainer(PlannedTrainerMixin, SFTTrainer):
        pass

    with init(plan, device="cpu", timeout=TIMEOUT) as context:
        return sft(sharding(PlannedSFTTrainer, options), options, context=context)


def test_packed_sft_has_the_loss_curve_of_one_process(pool: Pool, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    options = arguments(tmp_path, 1, 20, dataloader_drop_last=True, gradient_checkpointing=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = sft(in_order(trl.SFTTrainer, 1, 20), options)["loss"]
    found = pool.run(planned_sft, PLANS["uneven"], options | WRAPPERS["fsdp2"])[0]["loss"]
    assert len(found) == 20
    assert found == pytest.approx(expected, rel=1e-4)


# -------------------------------------------------------------------- rows


@pytest.mark.parametrize("num_rows", [1, 2, 3, 11, 12])
def test_every_row_is_read_by_one_replica(num_rows: int) -> None:
    dealt = [ReplicaRows(num_rows, [2, 1, 1], replica) for replica in range(3)]
    assert len({len(each) for each in dealt}) == 1
    counted = [row for each in dealt for passed in list(each)[: each.num_counted] for row in passed]
    assert sorted(counted) == list(range(num_rows))
    for each in dealt:
        assert all(passed for passed in each)


def test_a_last_pass_repeats_or_is_dropped() -> None:
    first, second = (ReplicaRows(5, [2, 1], replica) for replica in range(2))
    first.ending = second.ending = "repeat"
    assert [list(first), list(second)] == [[[0, 1], [3, 4]], [[2], [0]]]
    first.ending = "drop"
    assert list(first) == [[0, 1]]


def test_the_order_is_the_seed_s_and_the_epoch_s() -> None:
    assert shuffled(9, 0, 1) == shuffled(9, 0, 1)
    assert shuffled(9, 0, 1) != shuffled(9, 0, 2)
    assert sorted(shuffled(9, 0, 1)) == list(range(9))


def test_a_row_that_does_not_count_has_no_labels() -> None:
    data = [{"input_ids": torch.tensor([1, 2])}, {"input_ids": torch.tensor([3, 4])}]
    loader = EvaluationLoader(
        data, batch_sampler=ReplicaRows(1, [1, 1], 1), collate_fn=lambda found: found[0]
    )
    assert [batch["labels"].tolist() for batch in loader] == [[-100, -100]]
