"""The reproduction: its files, one small experiment from end to end, and what can be counted."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from drawn_problems import problem_for
from invented import CARD, cluster_of_nodes, one_replica
from typer.testing import CliRunner

from hexiseq_triton.cli import app
from hexiseq_triton.errors import ConfigError
from hexiseq_triton.planner import ModelSpec
from hexiseq_triton.planner.cost import evaluate
from hexiseq_triton.planner.files import build
from hexiseq_triton.planner.layouts import BASELINES
from hexiseq_triton.planner.lineup import Lineup
from hexiseq_triton.planner.problem import Group, Problem, Replica
from hexiseq_triton.planner.reproduction import ablations, optimality, runner
from hexiseq_triton.planner.reproduction.checks import checks
from hexiseq_triton.planner.reproduction.comparison import is_compute_bound
from hexiseq_triton.planner.reproduction.experiments import Experiment, Named, load_experiments
from hexiseq_triton.planner.reproduction.rows import Row
from hexiseq_triton.planner.reproduction.statistics import Speedups
from hexiseq_triton.planner.search import Search
from hexiseq_triton.planner.stages import Splitter
from hexiseq_triton.planner.tuner import Tuner
from hexiseq_triton.reports.reproduction.page import page

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENTS = ROOT / "bench" / "experiments"
NAMES = ["A1", "A2", "K1", "P4", "P5", "P6", "S1", "S2", "S3", "T1", "T2", "T3", "T4"]
FIELDS = ["experiment", "model", "seq_len", "mode", "ours", "baseline_paper", "speedup_paper",
          "bound_paper", "baseline_any", "speedup_any", "bound_any", "paper"]  # fmt: skip

SHAPE = {"layers": 1, "hidden": 384, "heads": 6, "ffn": 1536, "vocab": 64}
FREE_CARD = CARD | {"memory_gb_per_s": 1e6}
ONE_TWICE_AS_FAST = {
    "nodes": [{"name": "n", "gpus": ["card", "half"], "intra_latency_us": 1e-9}],
    "gpus": {"card": FREE_CARD, "half": FREE_CARD | {"dense_tflops": 0.5}},
}
SMALL = {
    "title": "one GPU twice as fast as the other",
    "kind": "comparison",
    "ours": "everything",
    "clusters": {"two": ONE_TWICE_AS_FAST},
    "seq_lens": [8192],
    "global_batch": 1,
    "modes": ["direct", "lockstep"],
    "baselines": ["zigzag_ring", "ulysses", "usp"],  # ring has causal work uneven as the GPUs
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the experiment Z1, and a model of 6 heads."""
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(SHAPE))
    (tmp_path / "experiments").mkdir()
    write(tmp_path, "Z1")
    return tmp_path


def write(folder: Path, name: str, **changes: Any) -> None:
    content = SMALL | {"models": [str(folder / "model.yaml")]} | changes
    given = {field: value for field, value in content.items() if value is not None}
    (folder / "experiments" / f"{name}.yaml").write_text(yaml.safe_dump(given))


def run(folder: Path, *more: str) -> tuple[int, str, str]:
    words = ["--experiments", "experiments", "--out", "out", "--page", "out/page.md"]
    paths = [str(folder / word) if not word.startswith("--") else word for word in words]
    result = CliRunner().invoke(app, ["reproduce", *paths, "--jobs", "1", *more])
    return result.exit_code, result.stdout, result.stderr


def summary(folder: Path) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = json.loads((folder / "out" / "summary.json").read_text())
    return content


# -------------------------------------------------------------------- the repository's own


def test_all_experiments_can_be_read() -> None:
    named = load_experiments(EXPERIMENTS)
    assert [each.name for each in named] == NAMES
    assert all(each.clusters for each in named)


def test_the_page_is_written_from_the_results() -> None:
    results = runner.Results.load(ROOT / "bench" / "results" / "reproduction" / "cells.jsonl")
    found = list(results.by_inputs.values())
    assert {row.experiment.split(":")[0] for result in found for row in result.rows} == set(NAMES)
    written = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    assert written == page(load_experiments(EXPERIMENTS), found)


# -------------------------------------------------------------------- end to end


def test_a_gpu_twice_as_fast_makes_equal_splits_half_slower(folder: Path) -> None:
    """Links are free: the baselines take as long as the slow GPU with one half, ours 2/3 of it."""
    code, out, err = run(folder)
    assert code == 0, err
    assert "Z1" in out
    rows = summary(folder)
    assert [row["mode"] for row in rows] == ["direct", "lockstep"]
    for row in rows:
        assert list(row) == FIELDS
        assert row["speedup_paper"] == pytest.approx(1.5, rel=0.02)
        assert row["bound_paper"] == pytest.approx(1.5, rel=0.02)
        assert 1 <= row["speedup_any"] <= row["bound_any"]
        assert row["speedup_any"] <= row["speedup_paper"] <= row["bound_paper"]
        assert row["paper"] is None
    text = (folder / "out" / "page.md").read_text()
    assert "## Z1: one GPU twice as fast as the other" in text
    assert (folder / "out" / "speedups.png").exists()


def test_what_is_known_is_not_computed_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, "Z2", seq_lens=[4096], modes=["direct"])
    assert run(folder, "--only", "Z1")[0] == 0
    computed: list[str] = []
    compute = runner.result_of

    def counted(cell: Any, code: str) -> runner.Result:
        computed.append(cell.experiment)
        return compute(cell, code)

    monkeypatch.setattr(runner, "result_of", counted)
    assert run(folder)[0] == 0
    assert computed == ["Z2"]
    assert {row["experiment"] for row in summary(folder)} == {"Z1", "Z2"}

    write(folder, "Z2", seq_lens=[4096], modes=["direct"], global_batch=2)
    assert run(folder)[0] == 0
    assert computed == ["Z2", "Z2"]
    assert run(folder, "--only", "Z1", "--fresh")[0] == 0
    assert computed == ["Z2", "Z2", "Z1"]
    assert len(summary(folder)) == 3


def test_a_run_that_was_ended_goes_on(folder: Path) -> None:
    assert run(folder)[0] == 0
    path = folder / "out" / "cells.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-40])  # ended while it wrote
    assert run(folder)[0] == 0
    assert json.loads(path.read_text())["rows"] == json.loads(whole)["rows"]

    path.write_text("no result\n" + whole)
    code, _, err = run(folder)
    assert code == 2
    assert "line 1 is no result" in err


def test_cells_without_room_have_no_ratio(folder: Path) -> None:
    small = ONE_TWICE_AS_FAST | {
        "gpus": {
            "card": FREE_CARD,
            "half": FREE_CARD | {"dense_tflops": 0.5, "memory_gb": 3.3},
        }
    }
    write(folder, "Z1", clusters={"two": small}, seq_lens=[131072], modes=["direct"])
    assert run(folder)[0] == 0
    (row,) = summary(folder)
    assert (row["baseline_paper"], row["speedup_paper"], row["bound_paper"]) == (None,) * 3
    assert row["ours"] > 0
    assert "none of the paper's baselines fits" in (folder / "out" / "page.md").read_text()


# -------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"title": None}, "title is missing"),
        ({"models": ["70x"]}, "models: model is '70x'; presets near it"),
        ({"baselines": ["usp", "uspp"]}, "baselines are usp, uspp; known are ring"),
        ({"kind": "parity"}, "kind parity needs `alike`"),
        ({"modes": ["spiral"]}, "modes.0 is 'spiral'"),
        ({"seq_lens": []}, "seq_lens"),
        ({"mixes": []}, "mixes is no field here"),
        ({"clusters": {"two": {"nodes": []}}}, "clusters.two: nodes is empty"),
        ({"sweep": {"seq_lens": [1], "rates": {"B200": [2]}}}, "sweep.rates names 'B200'"),
        ({"sweep": {"seq_lens": [1], "passes": [3]}}, "sweep.passes is 3"),
    ],
)
def test_wrong_experiments_are_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    write(folder, "Z1", **changes)
    with pytest.raises(ConfigError, match=r"Z1\.yaml") as error:
        load_experiments(folder / "experiments")
    assert message in str(error.value)


def test_a_page_that_cannot_be_written_is_refused_before_work(folder: Path) -> None:
    below_a_file = folder / "model.yaml" / "page.md"
    for path, says in ((folder, "which is a folder"), (below_a_file, "model.yaml is no folder")):
        code, _, error = run(folder, "--page", str(path))
        assert code == 2
        assert f"--page is {path}" in error
        assert says in error
        assert not (folder / "out").exists()


def test_missing_experiments_are_named(folder: Path) -> None:
    code, _, err = run(folder, "--only", "Z1,Z9")
    assert code == 2
    assert "there is no experiment 'Z9'; near it: Z1" in err
    with pytest.raises(ConfigError, match=r"holds no experiments .* name its bench/experiments"):
        load_experiments(folder / "nowhere")
    code, _, err = run(folder, "--jobs", "0")
    assert code == 2
    assert "--jobs is 0" in err


# -------------------------------------------------------------------- parts


def problem(seq_len: int, gpus: tuple[str, ...] = ("card", "half"), **card: float) -> Problem:
    return problem_for(
        cluster_of_nodes(list(gpus), **card), ModelSpec(**SHAPE), seq_len=seq_len, global_batch=1
    )


def test_long_sequences_are_compute_bound_and_short_ones_are_not() -> None:
    lengths = (1024, 16384, 262144)
    found = [is_compute_bound(problem(n, network_gb_per_s=0.1)) for n in lengths]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (False, True)


CHANGES: dict[str, Callable[[Problem, Replica], Replica]] = {
    "even_tokens": lambda _, replica: ablations.even_tokens(replica),
    "even_inside": lambda _, replica: ablations.even_inside(replica),
    "even_heads": lambda _, replica: ablations.even_heads(replica),
    "even_ranks": lambda problem, replica: ablations.even_ranks(Splitter(problem), replica),
    "heads_by_speed": ablations.heads_by_speed,
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_ablation_leaves_all_tokens_and_heads(name: str) -> None:
    given = problem(1000, ("card", "half", "half", "card"))
    before = Replica((Group((0, 1), (500, 200), (5, 1)), Group((2, 3), (299, 1), (1, 5))))
    after = CHANGES[name](given, before)
    assert after.num_tokens == 1000
    assert [sum(group.heads) for group in after.groups] == [6, 6]
    assert [group.ranks for group in after.groups] == [(0, 1), (2, 3)]
    if name == "even_tokens":
        assert [group.tokens for group in after.groups] == [(250, 250), (250, 250)]
    if name == "heads_by_speed":
        assert [group.heads for group in after.groups] == [(4, 2), (2, 4)]


def test_the_grid_has_every_layout_and_the_search_is_no_slower() -> None:
    given = problem(1600, network_gb_per_s=0.05)
    ways = optimality.compositions(16, 2)
    assert len(ways) == math.comb(17, 1)
    assert {int(total) for total in ways.sum(axis=1)} == {16}

    heads = [0, 1, 2, 3, 4, 5, 6]
    alone = [
        one_replica(Group((0, 1), (100 * t, 1600 - 100 * t), (h, 6 - h)), passes=1)
        for t, h in product(range(17), heads)
    ]
    apart = [
        one_replica(Group((a,), (100 * t,), (6,)), Group((b,), (1600 - 100 * t,), (6,)), passes=1)
        for t in range(1, 16)
        for a, b in ((0, 1), (1, 0))
    ]
    least = min(evaluate(given, layout).step_seconds for layout in alone + apart)
    found = optimality.best_of_grid(given, head_parts=6)
    assert found is not None
    assert found.step_seconds == pytest.approx(least, rel=1e-9)
    assert Search(given).best().step_seconds <= least * (1 + 1e-9)


def test_a_lineup_holds_whole_layouts_and_the_fastest_of_the_search() -> None:
    given = problem_for(
        cluster_of_nodes(["card", "half"], count=3, network_gb_per_s=1.0),
        ModelSpec(**SHAPE),
        seq_len=4096,
    )
    best = Search(given).best()
    found = Lineup(given).layouts(1.2 * best.step_seconds)
    assert len(found) > 10
    for cost in found:
        passes = cost.layout.accumulation
        assert passes * sum(replica.sequences for replica in cost.layout.replicas) == 8
        assert passes * cost.rows.tokens.sum() == 8 * 4096
    assert min(cost.step_seconds for cost in found) <= 1.01 * best.step_seconds


def test_a_tuner_keeps_the_fastest_grids() -> None:
    given = problem(4096, ("card", "half", "half", "card"))
    one, several = (BASELINES["usp"](Tuner(given, kept)) for kept in (1, 3))
    assert several[0].layout == one[0].layout
    seconds = [cost.step_seconds for cost in several]
    assert len(seconds) == 3
    assert seconds == sorted(seconds)


def test_means_leave_out_cells_without_a_ratio() -> None:
    def row(speedup: float | None) -> Row:
        return Row("X", "7b", 1024, "direct", 1.0, speedup_paper=speedup, bound_paper=speedup)

    found = Speedups.of([row(1.0), row(None), row(4.0)])
    assert found is not None
    assert (found.cells, found.geometric, found.arithmetic) == (2, pytest.approx(2.0), 2.5)
    assert found.most == row(4.0)
    assert Speedups.of([row(None)]) is None


def test_a_missed_check_names_its_cells() -> None:
    content = SMALL | {"models": ["7b"], "group": "simulations"}
    named = Named("Z1", build(Experiment, content, "Z1.yaml"), "Z1.yaml")
    notes = {"compute_bound": True}
    rows = [
        Row("Z1", "7b", 8192, "direct", 1.0, "a", speedup, 1.5, "b", any_, 1.2, notes=notes)
        for speedup, any_ in ((1.4, 1.1), (1.2, 0.9))
    ]
    shares, any_baseline = checks([named], rows)
    assert "missed (least 0.75 of 2; missed by 1: Z1 7b 8K direct)" in str(shares)
    assert "missed (least 0.9 of 2" in str(any_baseline)
    assert str(checks([named], rows[:1])[1]).endswith("held (least 1.1 of 1)")
