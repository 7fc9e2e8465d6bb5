"""`hexiseq plan` as a user runs it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from drawn_problems import EXAMPLES
from rich.console import Console
from typer.testing import CliRunner, Result

from hexiseq_triton.cli import app
from hexiseq_triton.cli_plan import plan_table
from hexiseq_triton.planner.plans import Plan, Split
from hexiseq_triton.planner.solve import plan

TWO_AND_TWO = EXAMPLES / "2-fast-2-slow.yaml"


def hexiseq_plan(*arguments: str, cluster: Path = TWO_AND_TWO, model: str = "tiny") -> Result:
    fixed = ["plan", "--cluster", str(cluster), "--model", model, "--seq-len", "4096"]
    return CliRunner().invoke(app, [*fixed, *arguments])


def test_json_is_one_object_with_everything_the_planner_knows() -> None:
    result = hexiseq_plan("--json")

    assert result.exit_code == 0
    printed = json.loads(result.stdout)
    expected = plan(TWO_AND_TWO, "tiny", seq_len=4096)
    assert expected.predicted is not None
    assert printed["planning_seconds"] > 0
    assert printed["predicted"] == {
        "step_seconds": expected.predicted.step_seconds,
        "tokens_per_second": 8 * 4096 / expected.predicted.step_seconds,
    }
    assert printed["gap"] == expected.gap
    assert printed["lower_bound_seconds"] == expected.lower_bound_seconds
    assert set(printed["baselines"]) == {"ring", "zigzag_ring", "ulysses", "usp"}
    assert all(set(b) == {"step_seconds", "reason"} for b in printed["baselines"].values())
    assert [group["replica"] for group in printed["groups"]] == [0, 0]
    share = expected.replicas[0].groups[0].ranks[1]
    assert printed["groups"][0]["ranks"][1] == {
        "rank": share.rank,
        "gpu": "slow",
        "tokens": share.tokens,
        "q_heads": [4, 6],
        "kv_heads": [2, 3],
        "memory_bytes": share.memory_bytes,
        "memory_limit_bytes": share.memory_limit_bytes,
    }


def test_out_writes_the_plan_and_options_reach_the_planner(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    options = {"--strategy": "zigzag_ring", "--global-batch": "6", "--accumulation": "2"}
    options |= {"--recompute": "none", "--out": str(path)}
    result = hexiseq_plan(*(word for option in options.items() for word in option))

    assert result.exit_code == 0
    written = Plan.load(path)
    assert written.strategy == "zigzag_ring: zigzag_ring"
    assert (written.global_batch, written.accumulation, written.recompute) == (6, 2, "none")


def test_the_table_shows_ranks_baselines_bound_and_gap() -> None:
    result = hexiseq_plan()

    assert result.exit_code == 0
    for word in ("fast", "slow", "[4, 6)", "zigzag_ring", "tokens/s", "gap"):
        assert word in result.stdout


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        ({"cluster": Path("none.yaml")}, "none.yaml: cannot be read"),
        ({"model": "8b"}, "presets near it"),
        ({"model": "70b"}, "out of memory: rank"),
    ],
)
def test_errors_are_one_message_on_stderr_and_exit_code_2(
    arguments: dict[str, Path | str], needle: str
) -> None:
    result = hexiseq_plan("--json", **arguments)  # type: ignore[arg-type]

    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("hexiseq: ")
    assert needle in result.stderr
    assert "Traceback" not in result.stderr


def test_a_plan_by_hand_has_a_table_too() -> None:
    by_hand = Plan.from_splits([Split((5, 3), (1, 1))], [Split((8,), (2,))])
    console = Console(width=120, file=io.StringIO())
    console.print(plan_table(by_hand))

    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "by hand" in text
    assert "(replica 1)" in text
