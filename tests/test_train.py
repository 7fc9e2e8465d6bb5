"""Training under a plan on real processes, held against one process with dense attention."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import TIMEOUT, Pool, free_port

from hexiseq_triton.context import init
from hexiseq_triton.errors import ConfigError
from hexiseq_triton.launch import node_commands
from hexiseq_triton.metrics import Report
from hexiseq_triton.planner import Plan, Split
from hexiseq_triton.single import SingleProcessTraining
from hexiseq_triton.train import Training, train, whole_gradients
from hexiseq_triton.training_config import CorpusOptions, TrainingConfig
from hexiseq_triton.training_parts import model_config

MODEL = "{layers: 2, hidden: 32, heads: 4, kv_heads: 2, ffn: 48, vocab: 256}"
UNEVEN = [Split((100, 0, 37), (2, 1, 1)), Split((119,), (4,))]
"""Two groups of 3 and 1 ranks; rank 1 holds no token. In a world of 5, rank 4 is idle."""


def uneven_plan(accumulation: int = 1) -> Plan:
    return Plan.from_splits(UNEVEN, num_kv_heads=2, world_size=5, accumulation=accumulation)


def replicas_plan(accumulation: int = 1) -> Plan:
    """Two replicas: three sequences on 2 + 1 ranks, one sequence on 2 ranks."""
    return Plan.from_splits(
        [Split((150, 50), (3, 1)), Split((190,), (4,))],
        [Split((99, 31), (1, 3))],
        num_kv_heads=2,
        sequences=(3, 1),
        accumulation=accumulation,
    )


@pytest.fixture
def config(tmp_path: Path) -> TrainingConfig:
    model = tmp_path / "model.yaml"
    model.write_text(MODEL, encoding="utf-8")
    return TrainingConfig(
        model=str(model),
        steps=3,
        lr=2e-3,
        warmup_steps=1,
        max_grad_norm=0.5,
        out=str(tmp_path / "out"),
        timeout_seconds=TIMEOUT.total_seconds(),
        corpus=CorpusOptions(max_document_tokens=300),
    )


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


def trained(rank: int, plan: Plan, config: TrainingConfig) -> list[Any]:
    """Worker: `train` on the CPU."""
    return train(plan, config, device="cpu")


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


def test_a_resumed_run_has_the_losses_of_one_never_interrupted(
    pool: Pool, config: TrainingConfig, tmp_path: Path
) -> None:
    plan = uneven_plan()
    whole = replace(config, steps=5, out=str(tmp_path / "whole"))
    begun = replace(config, steps=3, checkpoint_every=2)
    rest = replace(begun, steps=5, resume=True)

    expected = [m.loss for m in pool.run(trained, plan, whole)[0]]
    pool.run(trained, plan, begun)
    # as if the run had died while it wrote its last checkpoint and line
    Path(config.out, "checkpoints", "step-00000003", ".metadata").unlink()
    with Path(config.out, "metrics.jsonl").open("a", encoding="utf-8") as metrics:
        metrics.write('{"step": 4, "lo')
    resumed = pool.run(trained, plan, rest)[0]

    assert [m.step for m in resumed] == [3, 4, 5]
    assert [m.loss for m in resumed] == expected[2:]
    lines = Path(config.out, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [json.loads(line)["loss"] for line in lines] == expected


def test_a_run_can_go_on_under_another_plan(pool: Pool, config: TrainingConfig) -> None:
    other = Plan.from_splits([Split((256 - 4 * 13, *[13] * 4), (0, 1, 1, 1, 1))], num_kv_heads=2)
    begun = replace(config, checkpoint_every=2, steps=2)

    pool.run(trained, uneven_plan(), begun)
    resumed = pool.run(trained, other, replace(begun, steps=4, resume=True))[0]

    single = SingleProcessTraining(other, config, "cpu")
    expected = [single.step() for _ in range(4)]
    assert [m.loss for m in resumed] == pytest.approx(expected[2:], rel=1e-5)


@pytest.mark.parametrize("seq_len", [128, 96])
def test_a_run_goes_on_at_its_token_under_other_sequences(
    pool: Pool, config: TrainingConfig, seq_len: int
) -> None:
    """After 2 steps of 256 tokens and 3 of 128 or 96, text is neither skipped nor seen twice."""
    other = Plan.from_splits([Split((seq_len - 40, 40), (3, 1))], num_kv_heads=2, world_size=5)
    begun = replace(config, checkpoint_every=2, steps=2)
    pool.run(trained, uneven_plan(), begun)

    resumed = pool.run(trained, other, replace(begun, steps=5, resume=True))[0]

    single = SingleProcessTraining(uneven_plan(), config, "cpu")
    for _ in range(2):
        single.step()
    single.plan = other
    whole = single.corpus.sequences(range(1), 2 * 256 + 3 * seq_len)
    at = {2 + i: range(2 * 256 + i * seq_len, 2 * 256 + (i + 1) * seq_len) for i in range(3)}
    taken = []
    read = single.corpus.sequences

    def later(indices: range, length: int) -> Any:
        (step,) = indices
        pack = read(range(1), length, at[step].start)
        taken.append(pack.tokens)
        return pack

    single.corpus.sequences = later  # type: ignore[assignment, method-assign]
    expected = [single.step() for _ in range(3)]
    assert torch.equal(torch.cat(taken), whole.tokens[2 * 256 :])
    assert [m.loss for m in resumed] == pytest.approx(expected, rel=1e-5)

    again = replace(begun, steps=6, resume=True)  # from what the resumed run wrote
    (last,) = pool.run(trained, other, again)[0]
    at[5] = range(2 * 256 + 3 * seq_len, 0)
    assert last.loss == pytest.approx(single.step(), rel=1e-5)


def same_refusal(pool: Pool, plan: Plan, config: TrainingConfig) -> str:
    """Return the ConfigError that every rank raised."""
    outcomes = pool.outcomes(trained, plan, config)
    assert {outcome.kind for outcome in outcomes} == {"ConfigError"}
    assert len({outcome.error for outcome in outcomes}) == 1
    return outcomes[0].error


@pytest.mark.parametrize(
    "changed", [{"seed": 1}, {"corpus": CorpusOptions(max_document_tokens=200)}]
)
def test_resuming_in_another_text_is_refused(
    pool: Pool, config: TrainingConfig, changed: dict[str, Any]
) -> None:
    begun = replace(config, checkpoint_every=1, steps=1)
    pool.run(trained, uneven_plan(), begun)

    error = same_refusal(pool, uneven_plan(), replace(begun, resume=True, **changed))

    assert "step-00000001 stands at token 256 of another text (documents " in error


@pytest.mark.parametrize(
    ("every", "says"),
    [
        (2, r"another run \(1 checkpoints up to step-00000002\); resume: true goes on with it"),
        (None, r"another run \(metrics.jsonl, and no checkpoint to go on from\); name another out"),
    ],
)
def test_a_run_does_not_begin_in_the_folder_of_another(
    pool: Pool, config: TrainingConfig, every: int | None, says: str
) -> None:
    pool.run(trained, uneven_plan(), replace(config, steps=2, checkpoint_every=every))
    held = {path: path.read_bytes() for path in Path(config.out).rglob("*") if path.is_file()}

    error = same_refusal(pool, uneven_plan(), replace(config, checkpoint_every=1))

    assert re.search(says, error)
    assert config.out in error
    left = {path: path.read_bytes() for path in Path(config.out).rglob("*") if path.is_file()}
    assert left == held


def test_a_folder_that_cannot_be_made_is_the_same_error_on_every_rank(
    pool: Pool, config: TrainingConfig
) -> None:
    error = same_refusal(pool, uneven_plan(), replace(config, out=config.model))

    assert f"out is {config.model}, which is no folder" in error


def test_a_run_that_is_over_is_left_as_it_is(pool: Pool, config: TrainingConfig) -> None:
    begun = replace(config, steps=2, checkpoint_every=1)
    pool.run(trained, uneven_plan(), begun)
    metrics = Path(config.out, "metrics.jsonl").read_text("utf-8")

    assert pool.run(trained, uneven_plan(), replace(begun, steps=1, resume=True)) == [[]] * 5
    assert Path(config.out, "metrics.jsonl").read_text("utf-8") == metrics


def test_a_resumed_run_keeps_the_lines_of_its_steps_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n[]\n{"note": ""}\n{"step": 9}\n\xff\n{"st')
    with Report(path, start=1, steps=3):
        pass
    assert path.read_text("utf-8") == '{"step": 1}\n'


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


def weight_decays(rank: int, plan: Plan, config: TrainingConfig) -> list[float]:
    """Worker: what the optimizer decays by."""
    with init(plan, device="cpu", timeout=TIMEOUT) as context:
        return [g["weight_decay"] for g in Training(context, config).optimizer.param_groups]


def test_a_resumed_run_takes_the_weight_decay_it_is_given(
    pool: Pool, config: TrainingConfig
) -> None:
    begun = replace(config, checkpoint_every=1, steps=1)
    pool.run(trained, uneven_plan(), begun)

    changed = replace(begun, weight_decay=0.25, resume=True)

    assert pool.run(weight_decays, uneven_plan(), changed) == [[0.25, 0.0]] * 5


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
        timeout=120,
        check=True,
    )

    assert len(Path(config.out, "metrics.jsonl").read_text("utf-8").splitlines()) == 2


def test_resuming_without_a_checkpoint_is_the_same_error_on_every_rank(
    pool: Pool, config: TrainingConfig
) -> None:
    outcomes = pool.outcomes(trained, uneven_plan(), replace(config, resume=True))

    assert {outcome.kind for outcome in outcomes} == {"ConfigError"}
    assert len({outcome.error for outcome in outcomes}) == 1
    assert "holds no checkpoint" in outcomes[0].error


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


@pytest.mark.parametrize(("layers", "ffn"), [(1, 48), (3, 48), (2, 64)])
def test_a_checkpoint_of_another_model_is_refused(
    pool: Pool, config: TrainingConfig, tmp_path: Path, layers: int, ffn: int
) -> None:
    pool.run(trained, uneven_plan(), replace(config, steps=1, checkpoint_every=1))
    other = tmp_path / "other.yaml"
    text = MODEL.replace("layers: 2", f"layers: {layers}").replace("ffn: 48", f"ffn: {ffn}")
    other.write_text(text, encoding="utf-8")

    outcomes = pool.outcomes(trained, uneven_plan(), replace(config, model=str(other), resume=True))

    assert {outcome.kind for outcome in outcomes} == {"ConfigError"}
    assert len({outcome.error for outcome in outcomes}) == 1
    assert "holds another model: blocks." in outcomes[0].error


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
