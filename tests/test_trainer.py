"""transformers' Trainer and TRL's SFTTrainer under uneven plans equal themselves in one process."""

from __future__ import annotations

import itertools
import os
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import TIMEOUT, Pool

from hexiseq_triton.context import init
from hexiseq_triton.integrations.replica_rows import EvaluationLoader, ReplicaRows, shuffled
from hexiseq_triton.planner import Plan, Split

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

ROW, VOCAB = 48, 97
PLANS = {
    # rank 1 has no token; replicas read two rows and one; rank 4 is idle
    "uneven": Plan.from_splits(
        [Split((40, 0), (5, 3)), Split((56,), (8,))],
        [Split((48,), (8,))],
        sequences=[2, 1],
        num_kv_heads=2,
        world_size=5,
    ),
    "other": Plan.from_splits(
        [Split((24, 24, 24, 36, 36), (3, 1, 1, 1, 2))], sequences=[3], num_kv_heads=2
    ),
}


def rows(count: int, seed: int) -> list[dict[str, list[int]]]:
    """Return rows of random tokens; some labels do not count, and in row 4 none does.

    The first label never counts, but transformers 5.0 divides by it too.
    """
    draw = random.Random(seed)
    ids = [[draw.randrange(1, VOCAB) for _ in range(ROW)] for _ in range(count)]
    made = [{"input_ids": row, "labels": [-100, *row[1:-5], *[-100] * 5]} for row in ids]
    made[4]["labels"] = [-100] * ROW
    return made


def model() -> Any:
    """Return a small Llama with the same random weights everywhere."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=2, head_dim=16, pad_token_id=0,
        attn_implementation="eager",
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def arguments(out: Path, accumulation: int, steps: int, **extra: Any) -> dict[str, Any]:
    """Return the TrainingArguments that all runs share."""
    return {
        "output_dir": str(out), "use_cpu": True, "max_steps": steps, "learning_rate": 1e-2,
        "gradient_accumulation_steps": accumulation, "max_grad_norm": 0.5, "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, "seed": 3,
        "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1,
        "dataloader_pin_memory": False,
    } | extra  # fmt: skip


def logged(trainer: Any) -> dict[str, list[float]]:
    """Return what the Trainer logged, step by step."""
    history = trainer.state.log_history
    return {
        name: [line[name] for line in history if name in line] for name in ("loss", "grad_norm")
    }


def in_a_world(rank: int) -> None:
    """Worker: tell accelerate what torchrun would."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    values = (rank, rank, 5, 5, "127.0.0.1", 1)
    os.environ |= {name: str(value) for name, value in zip(names, values, strict=True)}
    warnings.simplefilter("ignore")


def sharding(trainer_class: type, options: dict[str, Any]) -> type:
    """Let accelerate shard with FSDP2 on CPUs too, where it offers DDP alone."""
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    if not options.get("fsdp"):
        return trainer_class

    class Sharded(trainer_class):  # type: ignore[misc]
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            state = self.accelerator.state
            state.distributed_type = DistributedType.FSDP
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            self.is_fsdp_enabled = True

    return Sharded


WRAPPERS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp2": {
        "fsdp": "full_shard",
        "fsdp_config": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"},
    },
}


def planned(
    rank: int, plan: Plan, options: dict[str, Any], resume: bool = False
) -> dict[str, list[float]]:
    """Worker: train under a plan."""
    in_a_world(rank)
    from hexiseq_triton.integrations.hf_trainer import PlannedTrainer

    with init(plan, device="cpu", timeout=TIMEOUT) as context:
        trainer = sharding(PlannedTrainer, options)(
            model(),
            args=transformers.TrainingArguments(**options),
            train_dataset=rows(18, 0),
            context=context,
        )
        trainer.train(resume_from_checkpoint=resume or None)
        return logged(trainer)


def in_order(trainer_class: type, accumulation: int, steps: int) -> type:
    """Let an unmodified Trainer read, three rows a pass, what all replicas together read."""

    class InOrder(trainer_class):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            loader = super().get_train_dataloader()
            count = len(loader.dataset)
            epochs = (shuffled(count, 3, epoch)[: count // 3 * 3] for epoch in range(99))
            wanted = 3 * accumulation * steps
            order = list(itertools.islice(itertools.chain.from_iterable(epochs), wanted))
            return torch.utils.data.DataLoader(
                loader.dataset, batch_size=3, sampler=order, collate_fn=loader.collate_fn
            )

    return InOrder


def alone(options: dict[str, Any], accumulation: int) -> dict[str, list[float]]:
    """Train in this process with the unmodified Trainer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = in_order(transformers.Trainer, accumulation, 3)(
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
    expected = alone(options, accumulation)
    for found in pool.run(planned, PLANS["uneven"], options | WRAPPERS[wrapper]):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_resumed_run_goes_on_with_the_next_rows(pool: Pool, tmp_path: Path, wrapper: str) -> None:
    """Six passes an epoch make two steps of three; the run is cut after step 3, inside epoch 2."""
    saving = {"save_strategy": "steps", "save_steps": 3}
    options = arguments(tmp_path, 3, 5, **saving, **WRAPPERS[wrapper])
    whole = pool.run(planned, PLANS["uneven"], options)[0]["loss"]
    (tmp_path / "checkpoint-5").rename(tmp_path / "last")
    for plan in PLANS.values():
        resumed = pool.run(planned, plan, options, True)[0]["loss"]
        assert resumed[3:] == pytest.approx(whole[3:], rel=1e-5)
        (tmp_path / "checkpoint-5").rename(tmp_path / f"last-{plan.digest[:8]}")


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


# -------------------------------------------------------------------- what is refused


def refusals(rank: int, folder: str) -> dict[str, str]:
    """Worker: what each unsupported request raises."""
    in_a_world(rank)
    from hexiseq_triton.integrations.hf_trainer import PlannedTrainer

    plain = arguments(Path(folder), 1, 1)
    requests: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "metrics": ({}, {"compute_metrics": lambda _: {}}),
        "loss": ({}, {"compute_loss_func": lambda *_, **__: 0.0}),
        "smoothing": ({"label_smoothing_factor": 0.1}, {}),
    }
    found = {}
    with init(PLANS["uneven"], device="cpu", timeout=TIMEOUT) as context:
        for name, (changed, extra) in requests.items():
            args = transformers.TrainingArguments(**plain | changed)
            try:
                PlannedTrainer(model(), args=args, context=context, **extra)
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found


def test_what_would_be_dropped_is_refused(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(refusals, str(tmp_path))[0]
    assert "InputError: compute_metrics needs logits" in found["metrics"]
    assert "InputError: only plain cross entropy" in found["loss"]
    assert "InputError: only plain cross entropy" in found["smoothing"]


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
