"""The demo, short, and what it does when a promise is broken."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hexiseq_triton.cli import app
from hexiseq_triton.demo import CLUSTER, Summary, _train_distributed, largest, run_demo
from hexiseq_triton.demo_report import print_losses, print_verdict
from hexiseq_triton.errors import PeerError
from hexiseq_triton.planner import Cluster, Plan, Split
from hexiseq_triton.training_config import TrainingConfig

KEPT = Summary(
    max_relative_loss_difference=1e-6,
    max_relative_gradient_difference=1e-6,
    loss_drop=2.0,
    losses_distributed=[5.0, 3.0],
    losses_single=[5.0, 3.0],
    documents_cut=1,
    seconds=1.0,
    device="cpu",
)


def test_a_short_demo_keeps_its_promises_and_writes_everything(tmp_path: Path) -> None:
    assert run_demo(tmp_path, steps=3, min_loss_drop=0.3)

    summary = json.loads((tmp_path / "summary.json").read_text("utf-8"))
    assert len(summary["losses_distributed"]) == len(summary["losses_single"]) == 3
    assert 0 < summary["max_relative_gradient_difference"] <= 1e-5
    assert summary["documents_cut"] > 0

    groups = Plan.load(tmp_path / "plan.json").replicas[0].groups
    assert len({len(group.ranks) for group in groups}) > 1
    assert len({tuple(share.q_heads for share in group.ranks) for group in groups}) > 1

    metrics = (tmp_path / "metrics.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["loss"] for line in metrics] == summary["losses_distributed"]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")

    events = json.loads((tmp_path / "trace.json").read_text("utf-8"))["traceEvents"]
    for rank in range(4):
        names = {event["name"] for event in events if event["pid"] == rank}
        assert {"forward", "loss", "backward", "optimizer", "attention"} <= names


def test_a_failing_process_fails_the_demo_with_its_message(tmp_path: Path) -> None:
    plan = Plan.from_splits([Split((8, 8), (4, 4))], num_kv_heads=4)
    config = TrainingConfig(model="no-such-model", steps=1, lr=1e-3, out=str(tmp_path))

    with pytest.raises(PeerError, match="model is 'no-such-model'"):
        _train_distributed(plan, config, "cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_relative_loss_difference": 1.1e-5}, "max_relative_loss_difference is 1.1e-05"),
        ({"max_relative_gradient_difference": float("nan")}, "gradient_difference is nan"),
        ({"loss_drop": 1.49}, "loss_drop is 1.49 nats; it must be at least 1.5"),
        ({"documents_cut": 0}, "no cut runs through a document"),
    ],
)
def test_a_broken_promise_is_named(change: dict[str, float], message: str) -> None:
    (failure,) = replace(KEPT, **change).failures(1.5)

    assert message in failure
    assert KEPT.failures(1.5) == []


def test_one_nan_among_the_differences_is_not_passed_over() -> None:
    assert math.isnan(largest([1e-6, float("nan"), 1e-7]))
    assert largest([1e-6, 3e-6, 1e-7]) == 3e-6


def test_the_verdict_names_its_files_in_one_line_each_as_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = Path("a folder [bold] of a run", "with a long name", "that no terminal holds " * 5)
    print_losses([5.0], [5.0])
    print_verdict(KEPT, ["loss_drop is 1.2"], out)

    printed = capsys.readouterr().out
    assert f"open {out / 'loss.png'}, and {out / 'trace.json'} in" in printed
    assert "failed: loss_drop is 1.2\n" in printed


@pytest.mark.parametrize(("kept", "code"), [(True, 0), (False, 1)])
def test_the_command_exits_by_whether_the_promises_were_kept(
    monkeypatch: pytest.MonkeyPatch, kept: bool, code: int
) -> None:
    monkeypatch.setattr("hexiseq_triton.demo.run_demo", lambda out: kept)

    assert CliRunner().invoke(app, ["demo"]).exit_code == code


def test_the_demo_plans_the_cluster_of_the_example() -> None:
    example = Path(__file__).parents[1] / "examples" / "clusters" / "2-fast-2-slow.yaml"

    assert Cluster.load(example).digest == Cluster.from_mapping(CLUSTER).digest
