"""Runs that go on, and the folders they lie in: at which token, in which text, over what."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import TIMEOUT, Pool
from training_runs import MODEL, config_in, same_refusal, trained, uneven_plan

from hexiseq_triton.context import init
from hexiseq_triton.metrics import Report
from hexiseq_triton.planner import Plan, Split
from hexiseq_triton.single import SingleProcessTraining
from hexiseq_triton.train import Training
from hexiseq_triton.training_config import CorpusOptions, TrainingConfig


@pytest.fixture
def config(tmp_path: Path) -> TrainingConfig:
    return config_in(tmp_path)


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
        (2, r"another run \(1 checkpoint up to step-00000002\); resume: true goes on with it"),
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


def test_resuming_without_a_checkpoint_is_the_same_error_on_every_rank(
    pool: Pool, config: TrainingConfig
) -> None:
    outcomes = pool.outcomes(trained, uneven_plan(), replace(config, resume=True))

    assert {outcome.kind for outcome in outcomes} == {"ConfigError"}
    assert len({outcome.error for outcome in outcomes}) == 1
    assert "holds no checkpoint" in outcomes[0].error


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
