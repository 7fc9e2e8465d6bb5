"""Training under a plan on real processes, held against one process with dense attention."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import TIMEOUT, Pool, free_port
from training_runs import UNEVEN, config_in, replicas_plan, trained, uneven_plan

from hexiseq_triton.context import init
from hexiseq_triton.errors import ConfigError
from hexiseq_triton.launch import node_commands
from hexiseq_triton.planner import ModelSpec, Plan, Split
from hexiseq_triton.planner.write import noun_digest
from hexiseq_triton.single import SingleProcessTraining
from hexiseq_triton.train import Training, train, whole_gradients
from hexiseq_triton.training_config import CorpusOptions, TrainingConfig
from hexiseq_triton.training_parts import model_config


@pytest.fixture
def config(tmp_path: Path) -> TrainingConfig:
    return config_in(tmp_path)


def losses_and_first_gradients(
    rank: int, plan: Plan, config: TrainingConfig
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Worker: take the configured steps."""
    with init(plan, device="cpu", timeout=TIMEOUT) as context:
        training = Training(context, config)
        losses = [float(training.backward())]
        gradients = whole_gradients(training)
        training.update()
        losses += [training.step().loss for _ in range(config.steps - 1)]
        return losses, gradients


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(uneven_plan(), id="uneven"),
        pytest.param(uneven_plan(accumulation=3), id="uneven, 3 passes"),
        pytest.param(replicas_plan(), id="replicas 3:1"),
        pytest.param(replicas_plan(accumulation=3), id="replicas 3:1, 3 passes"),
    ],
)
def test_losses_and_every_gradient_equal_those_of_one_process(
    pool: Pool, config: TrainingConfig, plan: Plan
) -> None:
    results = pool.run(losses_and_first_gradients, plan, config)

    single = SingleProcessTraining(plan, config, "cpu")
    expected = [single.backward()]
    gradients = {name: p.grad.clone() for name, p in single.model.named_parameters()}
    single.update()
    expected += [single.step() for _ in range(config.steps - 1)]
    for losses, _ in results:
        assert losses == results[0][0]
        assert losses == pytest.approx(expected, rel=1e-5)
    found = results[0][1]
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
        assert gradient.norm() > 0, name


def test_metrics_are_json_lines_and_what_train_returns(pool: Pool, config: TrainingConfig) -> None:
    returned = pool.run(trained, uneven_plan(accumulation=2), config)

    lines = Path(config.out, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [json.loads(line) for line in lines]
    assert [m["step"] for m in metrics] == [1, 2, 3]
    assert [m["loss"] for m in metrics] == [m.loss for m in returned[0]]
    for line in metrics:
        assert line.keys() == {"step", "loss", "tokens", "seconds", "tokens_per_second"}
        assert line["tokens"] == 2 * 256
        assert line["tokens_per_second"] == pytest.approx(line["tokens"] / line["seconds"])


def warnings_of(rank: int, plan: Plan, config: TrainingConfig) -> list[str]:
    """Worker: what is logged while a training is made."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("hexiseq_triton.train")
    log.addHandler(handler)
    try:
        with init(plan, device="cpu", timeout=TIMEOUT) as context:
            Training(context, config)
    finally:
        log.removeHandler(handler)
    return told


def test_a_corpus_smaller_than_a_step_is_told_once(
    pool: Pool, config: TrainingConfig, tmp_path: Path
) -> None:
    (tmp_path / "one.txt").write_text("a" * 100, encoding="utf-8")
    small = replace(config, corpus=CorpusOptions(folder=str(tmp_path), pattern="*.txt"))

    told, *others = pool.run(warnings_of, uneven_plan(), small)

    assert told == ["a step takes 256 tokens, and the corpus has 100: each step repeats documents"]
    assert others == [[]] * 4


def test_a_plan_for_another_model_is_told_once(pool: Pool, config: TrainingConfig) -> None:
    own, other = noun_digest(ModelSpec.load(config.model)), "0" * 64
    right, wrong = (replace(uneven_plan(), made_from={"model": made}) for made in (own, other))

    assert pool.run(warnings_of, right, config) == [[]] * 5
    (told,), *others = pool.run(warnings_of, wrong, config)
    assert told.startswith(f"the plan was made for another model than {config.model}")
    assert others == [[]] * 4


def test_recomputing_layers_changes_no_bit(pool: Pool, config: TrainingConfig) -> None:
    kept = replace(config, recompute="none")

    recomputed = pool.run(losses_and_first_gradients, uneven_plan(), config)[0]

    losses, gradients = pool.run(losses_and_first_gradients, uneven_plan(), kept)[0]
    assert recomputed[0] == losses
    assert all(torch.equal(recomputed[1][name], gradients[name]) for name in gradients)


def recomputes(rank: int, plan: Plan, config: TrainingConfig) -> bool:
    """Worker: whether the first layer is set to recompute."""
    with init(plan, device="cpu", timeout=TIMEOUT) as context:
        return bool(Training(context, config).model.blocks[0].recompute)


@pytest.mark.parametrize(
    ("of_plan", "of_config", "expected"),
    [(None, None, True), ("none", None, False), ("none", "full", True)],
)
def test_the_plan_says_what_to_recompute_unless_the_run_does(
    pool: Pool, config: TrainingConfig, of_plan: Any, of_config: Any, expected: bool
) -> None:
    plan = replace(uneven_plan(), recompute=of_plan)
    found = pool.run(recomputes, plan, replace(config, recompute=of_config))
    assert set(found) == {expected}


def test_the_launched_command_trains(config: TrainingConfig, tmp_path: Path) -> None:
    plan = Plan.from_splits([Split((100, 156), (3, 1))], num_kv_heads=2)
    plan.save(tmp_path / "plan.json")
    text = f"{{model: {config.model}, steps: 2, lr: 1.0e-3, out: {config.out}}}"
    (tmp_path / "train.yaml").write_text(text, "utf-8")
    program = ["hexiseq", "train", "--plan", "plan.json", "--config", "train.yaml"]
    (command,) = node_commands(plan, ["127.0.0.1"], program, port=free_port())
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))

    subprocess.run(
        command.arguments,
        env=os.environ | {"PATH": path, "GLOO_SOCKET_IFNAME": "lo"},
        cwd=tmp_path,
        timeout=300,
        check=True,
    )

    assert len(Path(config.out, "metrics.jsonl").read_text("utf-8").splitlines()) == 2


def test_bf16_keeps_close_to_fp32_and_its_parameters_in_fp32(
    pool: Pool, config: TrainingConfig
) -> None:
    exact = [m.loss for m in pool.run(trained, uneven_plan(), config)[0]]

    low = replace(config, dtype="bf16")
    losses, gradients = pool.run(losses_and_first_gradients, uneven_plan(), low)[0]

    assert losses == pytest.approx(exact, rel=1e-2)
    assert losses != exact
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}


def trained_as(rank: int, plan: Plan, configs: list[TrainingConfig]) -> list[Any]:
    """Worker: `train` on the CPU, each rank by its own configuration."""
    return train(plan, configs[rank], device="cpu")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"lr": 0.5}, "  rank 4: lr 0.5"),
        ({"steps": 4}, "  rank 4: steps 4"),
        ({"corpus": CorpusOptions(max_document_tokens=200)}, "  rank 4: corpus "),
    ],
)
def test_ranks_with_different_configurations_raise_the_same_error(
    pool: Pool, config: TrainingConfig, changed: dict[str, Any], says: str
) -> None:
    configs = [*[config] * 4, replace(config, **changed)]

    outcomes = pool.outcomes(trained_as, replicas_plan(), configs)

    assert {outcome.kind for outcome in outcomes} == {"ConfigError"}
    assert len({outcome.error for outcome in outcomes}) == 1
    assert outcomes[0].error.startswith("ranks train differently")
    assert outcomes[0].error.splitlines()[-1].startswith(says)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("steps: 0", "steps is 0"),
        ("steps: on", "steps is True: a number is needed"),
        ("lr: fast", "lr is 'fast'"),
        ("dtype: fp8", "dtype is 'fp8'.*'fp32' or 'bf16'"),
        ("stepps: 5", "stepps is no field here"),
        ("corpus: {pattern: 3}", "corpus.pattern is 3"),
        ("checkpoint_every: -1", "checkpoint_every is -1"),
    ],
)
def test_a_wrong_field_is_named_with_its_value(tmp_path: Path, wrong: str, message: str) -> None:
    fields = {"model": "tiny", "steps": "1", "lr": "1.0e-3"}
    fields.pop(wrong.split(":")[0], None)
    path = tmp_path / "train.yaml"
    path.write_text("\n".join([*(f"{k}: {v}" for k, v in fields.items()), wrong]), "utf-8")

    with pytest.raises(ConfigError, match=f"train.yaml: {message}"):
        TrainingConfig.load(path)


def test_the_example_is_a_valid_configuration() -> None:
    example = Path(__file__).parents[1] / "examples" / "train.yaml"

    assert TrainingConfig.load(example).model == "tiny"


def test_a_model_that_does_not_fit_the_plan_is_refused(config: TrainingConfig) -> None:
    tiny = replace(config, model="tiny")
    with pytest.raises(ConfigError, match=r"8 query heads, 4 KV heads.*plan is for 4, 2"):
        model_config(tiny, uneven_plan())
    full = Plan.from_splits(UNEVEN, num_kv_heads=2, causal=False)
    with pytest.raises(ConfigError, match="causal: true"):
        model_config(config, full)


def test_warmup_raises_the_learning_rate_in_equal_steps(config: TrainingConfig) -> None:
    warm = replace(config, lr=4.0, warmup_steps=3)

    assert [warm.lr_at(step) for step in range(6)] == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0]
