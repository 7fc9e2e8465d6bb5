"""`hexiseq plan` as a user runs it."""

from __future__ import annotations

import io
import json
import re
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from drawn_problems import TWO_AND_TWO
from typer.testing import CliRunner, Result

from hexiseq_triton.cli import app
from hexiseq_triton.errors import PlanError
from hexiseq_triton.planner.plans import Plan
from hexiseq_triton.planner.solve import STRATEGIES, plan


def hexiseq_plan(
    *arguments: str, cluster: Path = TWO_AND_TWO, model: str = "tiny", seq_len: int | None = 4096
) -> Result:
    fixed = ["plan", "--cluster", str(cluster), "--model", model]
    length = [] if seq_len is None else ["--seq-len", str(seq_len)]
    return CliRunner().invoke(app, [*fixed, *length, *arguments])


def succeeded(result: Result) -> str:
    assert result.exit_code == 0, result.stderr or result.exception
    return result.stdout


def test_the_version_is_the_packages() -> None:
    result = CliRunner().invoke(app, ["--version"])

    assert (result.exit_code, result.stdout) == (0, f"hexiseq {version('hexiseq-triton')}\n")


@pytest.mark.parametrize("compiled", [False, True], ids=["python", "compiled"])
def test_ctrl_c_is_one_line_and_exit_code_130(
    monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            if compiled:  # as numba reports it
                raise SystemError("returned a result with an exception set") from error
            raise

    monkeypatch.setattr("hexiseq_triton.commands.plan.plan", interrupted)
    result = hexiseq_plan()

    assert result.exit_code == 130
    assert (result.stdout, result.stderr) == ("", "hexiseq: interrupted\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line() -> None:
    result = hexiseq_plan("--out", "/dev/full")

    assert result.exit_code == 2
    # with an empty cache a line before it says that the planner is compiled
    assert result.stderr.splitlines()[-1] == "hexiseq: [Errno 28] No space left on device"
    assert "Traceback" not in result.stderr


def test_ascii_output_has_the_numbers_of_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["plan", "--cluster", str(TWO_AND_TWO), "--model", "tiny", "--seq-len", "4096"]
    written = io.BytesIO()
    with io.TextIOWrapper(written, encoding="ascii", write_through=True) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        app(words, standalone_mode=False)
        print("the node café")  # names in a user's files may hold anything
        text = written.getvalue().decode("ascii")

    assert text.endswith("the node caf?\n")
    assert "##... 3.2/7.6" in text
    assert figures(text) == figures(succeeded(hexiseq_plan()))


def figures(text: str) -> list[str]:
    return re.findall(r"\d[\d.,]*", text)[:-1]


def test_json_is_one_object_with_everything_the_planner_knows() -> None:
    printed = json.loads(succeeded(hexiseq_plan("--json", "--explain")))
    expected = plan(TWO_AND_TWO, "tiny", seq_len=4096)

    assert expected.predicted is not None
    step = expected.predicted.step_seconds
    assert printed["planning_seconds"] > 0
    assert printed["predicted"] == {
        "step_seconds": step,
        "tokens_per_second": pytest.approx(8 * 4096 / step, rel=1e-12),
    }
    assert printed["gap"] == expected.gap
    assert printed["lower_bound_seconds"] == expected.lower_bound_seconds
    assert set(printed["baselines"]) == set(expected.baselines) >= {"ring", "ulysses", "usp"}
    fields = {"step_seconds", "reason", "executable"}
    assert all(set(baseline) == fields for baseline in printed["baselines"].values())
    assert printed["assumed"]["fast"]["memory_gb_per_s"] == 1000
    ranks = [rank for group in printed["groups"] for rank in group["ranks"]]
    share = expected.shares[1]
    assert ranks[1] == {
        "rank": share.rank,
        "gpu": share.gpu,
        "tokens": share.tokens,
        "q_heads": list(share.q_heads),
        "kv_heads": list(share.kv_heads),
        "memory_bytes": share.memory_bytes,
        "memory_limit_bytes": share.memory_limit_bytes,
    }
    for rank in range(4):
        assert sum(seconds[rank] for seconds in printed["terms"].values()) == pytest.approx(step)


def test_out_writes_the_plan_and_options_reach_the_planner(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    options = {"--strategy": "zigzag_ring", "--global-batch": "6", "--accumulation": "2"}
    options |= {"--recompute": "none", "--out": str(path), "--memory-limit-share": "0.5"}
    succeeded(hexiseq_plan(*(word for option in options.items() for word in option)))

    written = Plan.load(path)
    assert written.strategy.startswith("zigzag_ring: ")
    assert (written.global_batch, written.accumulation, written.recompute) == (6, 2, "none")
    assert {share.memory_limit_bytes for share in written.shares} == {4 * 10**9, 6 * 10**9}


def test_the_text_has_ranks_baselines_bound_gap_and_what_is_assumed() -> None:
    text = succeeded(hexiseq_plan("--explain"))

    for word in ("fast", "slow", "0, 8)", "zigzag_ring", "faster", "tokens/s", "gap"):
        assert word in text
    for word in ("forward attention", "optimizer", "assumed of slow: memory_gb_per_s 1000"):
        assert word in text


def test_the_longest_sequence_fills_some_gpu(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    succeeded(
        hexiseq_plan("--max-seq-len", "--global-batch", "1", "--out", str(path), seq_len=None)
    )

    longest = Plan.load(path)
    assert longest.seq_len > 10_000
    fullest = max(share.memory_bytes / share.memory_limit_bytes for share in longest.shares)
    assert 0.98 < fullest <= 1


def test_documents_change_the_prediction_and_label_the_plan(tmp_path: Path) -> None:
    whole = json.loads(succeeded(hexiseq_plan("--json")))
    packed = json.loads(succeeded(hexiseq_plan("--json", "--documents", "1000,96,3000")))

    assert packed["predicted"]["step_seconds"] < whole["predicted"]["step_seconds"]
    assert any("heuristic" in note for note in packed["notes"])
    assert whole["notes"] == []


def test_the_bound_is_the_plans_under_a_memory_limit() -> None:
    options = ("--global-batch", "4", "--memory-limit-share", "0.6", "--json")
    printed = json.loads(succeeded(hexiseq_plan(*options, seq_len=524288)))

    assert printed["bounds"]["passes"] == 2
    assert printed["bounds"]["layers"] == printed["lower_bound_seconds"]


@pytest.mark.parametrize(
    ("option", "path", "message"),
    [
        ("--out", "absent/plan.json", "--out is absent/plan.json; there is no folder absent"),
        ("--out", ".", "--out is ., which is a folder"),
        ("--report", "absent/plan.html", "there is no folder absent"),
    ],
)
def test_what_cannot_be_written_is_refused_before_planning(
    option: str, path: str, message: str
) -> None:
    result = hexiseq_plan(option, path, cluster=Path("absent.yaml"))

    assert result.exit_code == 2
    assert message in result.stderr


def test_the_report_is_written(tmp_path: Path) -> None:
    succeeded(hexiseq_plan("--report", str(tmp_path / "plan.html")))

    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert text.count("<svg") == 3
    assert ">all-to-all<" in text
    assert "forward all-to-all" not in text  # both directions are stacked as one


def test_gpus_that_cannot_run_are_planned_only_as_a_what_if(tmp_path: Path) -> None:
    cluster, path = tmp_path / "old.yaml", tmp_path / "plan.json"
    cluster.write_text("nodes: [{name: a, gpus: {V100-SXM-32GB: 2, L4: 1}}]", encoding="utf-8")
    refused = hexiseq_plan(cluster=cluster)
    assert refused.exit_code == 2
    assert "V100-SXM-32GB cannot run this package's kernels: it has no bf16" in refused.stderr

    text = succeeded(hexiseq_plan("--what-if", "--out", str(path), cluster=cluster))
    assert "V100-SXM-32GB cannot run" in text
    with pytest.raises(PlanError, match=r"cannot be carried out: .*V100-SXM-32GB cannot run"):
        Plan.load(path).check_executable()


def test_the_splits_are_certified_on_demand() -> None:
    text = succeeded(hexiseq_plan("--certify", "--strategy", "ulysses", "--accumulation", "8"))
    printed = json.loads(succeeded(hexiseq_plan("--certify", "--json")))

    assert "certified by CBC: no split of any of 1 group," in text
    assert "bounds: " in text
    assert "with whole heads" in text
    bounds = printed["bounds"]
    assert bounds["heads"] > 0
    assert printed["predicted"]["step_seconds"] >= bounds[bounds["binding"]]
    assert len(printed["certificates"]) == len(printed["groups"])
    for certificate in printed["certificates"]:
        assert 0 < certificate["proved_seconds"] <= certificate["seconds"] * (1 + 1e-9)


@pytest.mark.parametrize("documents", [(), ("--documents", "3000,1096")], ids=["one", "two"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_is_explained_by_its_own_cost(
    strategy: str, documents: tuple[str, ...]
) -> None:
    options = ("--json", "--explain", "--strategy", strategy, *documents)
    printed = json.loads(succeeded(hexiseq_plan(*options)))

    step = printed["predicted"]["step_seconds"]
    for rank in range(4):
        assert sum(seconds[rank] for seconds in printed["terms"].values()) == pytest.approx(step)


@pytest.mark.parametrize(
    ("arguments", "options", "needle"),
    [
        ({"cluster": Path("none.yaml")}, (), "none.yaml: cannot be read"),
        ({"model": "8b"}, (), "presets near it"),
        ({"model": "70b"}, (), "out of memory: rank"),
        ({"seq_len": None}, (), "give one of --seq-len and --max-seq-len"),
        ({}, ("--max-seq-len",), "give one of --seq-len and --max-seq-len"),
        ({"seq_len": None}, ("--max-seq-len", "--documents", "9"), "--documents fill a --seq-len"),
        ({}, ("--documents", "one,two"), "--documents is 'one,two'"),
        ({}, ("--documents", "100,200"), "documents hold 300 tokens and seq_len is 4096"),
        ({}, ("--gpus", "none.yaml"), "none.yaml: cannot be read"),
        ({}, ("--strategy", "magic"), "strategy is 'magic'; it is one of hexiseq"),
        ({}, ("--memory-limit-share", "2"), "memory_limit_share is 2"),
        ({}, ("--time-limit-seconds", "nan"), "time_limit_seconds is nan"),
        ({}, ("--accumulation", "3"), "hexiseq: global_batch 8 does not divide by accumulation 3"),
        ({}, ("--global-batch", "1000000000"), "global_batch is 1000000000"),
        ({"seq_len": 10**20}, (), "seq_len is 100000000000000000000"),
    ],
)
def test_errors_are_one_message_on_stderr_and_exit_code_2(
    arguments: dict[str, Path | str | None], options: tuple[str, ...], needle: str
) -> None:
    result = hexiseq_plan("--json", *options, **arguments)  # type: ignore[arg-type]

    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("hexiseq: ")
    assert needle in result.stderr
    assert "Traceback" not in result.stderr


def test_an_error_is_written_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of several ranks would run into each other if their ends came later."""
    written: list[str] = []
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=written.append))
    code = app(["plan", "--cluster", "absent.yaml", "--model", "tiny"], standalone_mode=False)
    assert code == 2
    assert len(written) == 1
    assert written[0].endswith("--max-seq-len\n")
