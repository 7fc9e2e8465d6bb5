"""What comes out of a simulation: command line, trace, plots, page, validation, and refusals."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml
from drawn_problems import problem_for
from invented import CARD, MODEL, one_each
from typer.testing import CliRunner

from hexiseq_triton.cli import app
from hexiseq_triton.errors import ConfigError, PlanError
from hexiseq_triton.planner import Cluster, ModelSpec, Plan, Split, plan
from hexiseq_triton.planner.cost import evaluate
from hexiseq_triton.planner.explain import workload_of
from hexiseq_triton.planner.simulator import simulate, simulate_plan
from hexiseq_triton.planner.simulator.lengths import at_length, powers_around
from hexiseq_triton.planner.simulator.trace import LANES, trace_events

SPLITS = [Split((600, 300), (3, 1)), Split((250, 250), (2, 2))]
NODES = [{"name": "n", "gpus": ["card"] * 2, "count": 2}]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with plan.json for four GPUs, cluster.yaml and model.yaml."""
    folder = tmp_path_factory.mktemp("simulate")
    plan = Plan.from_splits(SPLITS, num_kv_heads=2, head_dim=16)
    plan.save(folder / "plan.json")
    cards = {"card": CARD | {"network_gb_per_s": 1.0}}
    (folder / "cluster.yaml").write_text(yaml.safe_dump({"nodes": NODES, "gpus": cards}))
    shape = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 100}
    (folder / "model.yaml").write_text(yaml.safe_dump(shape))
    return folder


def run(files: Path, *more: str) -> tuple[int, str, str]:
    words = ["--plan", "plan.json", "--cluster", "cluster.yaml", "--model", "model.yaml", *more]
    paths = [str(files / word) if (files / word).exists() else word for word in words]
    result = CliRunner().invoke(app, ["simulate", *paths])
    return result.exit_code, result.stdout, result.stderr


def simulated(files: Path, **options: object) -> object:
    return simulate_plan(
        Plan.load(files / "plan.json"),
        Cluster.load(files / "cluster.yaml"),
        ModelSpec.load(files / "model.yaml"),
        **options,  # type: ignore[arg-type]
    )


def test_the_command_prints_the_step_and_every_rank(files: Path) -> None:
    code, out, _ = run(files, "--straggler", "2:1.5", "--jitter", "0.05", "--seed", "3")
    assert code == 0
    assert "tokens/s" in out
    assert "rank 2 1.5 times" in out
    assert "backward" in out


def test_no_time_is_printed_below_0(files: Path) -> None:
    _, printed, _ = run(files, "--straggler", "0:1.5")  # whose idle time rounds to -2e-19 s
    assert "-0.000" not in printed
    assert "e-18" not in printed
    assert "e-19" not in printed


def test_json_adds_up(files: Path) -> None:
    code, out, _ = run(files, "--json", "--mode", "lockstep", "--engine", "fast")
    found = json.loads(out)
    assert code == 0
    sections = found["sections"].values()
    assert found["step_seconds"] == pytest.approx(sum(s["runs"] * s["seconds"] for s in sections))
    assert found["sections"]["forward"]["runs"] == 2
    for rank in found["ranks"]:
        parts = [rank[f"{name}_seconds"] for name in ("compute", "exposed", "idle")]
        assert sum(parts) == pytest.approx(found["step_seconds"])


@pytest.mark.parametrize("share", [0.5, 0.5123456, None])
def test_memory_limits_are_the_plans(files: Path, tmp_path: Path, share: float | None) -> None:
    options = {} if share is None else {"memory_limit_share": share}
    path = tmp_path / "plan.json"
    made = plan(files / "cluster.yaml", files / "model.yaml", seq_len=1400, **options)  # type: ignore[arg-type]
    made.save(path)
    code, out, err = run(files, "--plan", str(path), "--json")

    assert code == 0, err
    shown = {rank["rank"]: rank["memory_limit_bytes"] for rank in json.loads(out)["ranks"]}
    assert made.shares
    assert all(shown[each.rank] == each.memory_limit_bytes for each in made.shares)


def test_a_trace_shows_every_operation_on_its_rank(files: Path, tmp_path: Path) -> None:
    code, _, _ = run(files, "--trace", str(tmp_path / "trace.json"))
    assert code == 0
    content = json.loads((tmp_path / "trace.json").read_text())
    complete = [event for event in content["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in complete} == {0, 1, 2, 3}
    assert {event["tid"] for event in complete} == set(range(len(LANES)))
    names = {event["args"]["name"] for event in content["traceEvents"] if event["ph"] == "M"}
    assert "rank 0: card, n-0" in names


def test_a_trace_computes_as_long_as_the_simulation_says(files: Path) -> None:
    found = simulated(files, engine="event")
    computed = np.zeros(4)
    for event in trace_events(found):  # type: ignore[arg-type]
        if event["tid"] == 0:
            computed[event["pid"]] += event["dur"] / 1e6
    once = sum(part.computing for part in found.sections.values())  # type: ignore[attr-defined]
    assert computed == pytest.approx(once)


def test_plots_and_a_page_that_needs_nothing_else(files: Path, tmp_path: Path) -> None:
    page, plots = tmp_path / "page.html", tmp_path / "plots"
    code, _, _ = run(files, "--plots", str(plots), "--report", str(page), "--engine", "fast")
    assert code == 0
    assert sorted(path.name for path in plots.iterdir()) == [
        "gantt.png",
        "phases.png",
        "throughput.png",
    ]
    text = page.read_text()
    assert text.count("data:image/png;base64,") == 3
    assert "http" not in text


def test_at_another_length_ranks_keep_their_shares() -> None:
    problem = problem_for(Cluster.from_mapping({"nodes": NODES, "gpus": {"card": CARD}}), MODEL,
                          seq_len=1000)  # fmt: skip
    cost = evaluate(problem, one_each(500, 250, 150, 100))
    assert powers_around(1000, times=2) == [500, 1000, 2000]
    longer = at_length(cost, 2001)
    assert longer.rows.tokens.tolist() == [1000, 501, 300, 200]
    assert longer.problem.workload.seq_len == 2001


# -------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"heads": 8, "kv_heads": 2}, "the plan is for 4 query heads"),
        ({"kv_heads": 4}, "the plan is for 2 KV heads"),
        ({"head_dim": 32}, "the plan is for 16 head dimension"),
    ],
)
def test_another_model_is_refused(files: Path, model: dict[str, int], message: str) -> None:
    shape = yaml.safe_load((files / "model.yaml").read_text()) | model
    (files / "other.yaml").write_text(yaml.safe_dump(shape))
    code, _, err = run(files, "--model", "other.yaml")
    assert code == 2
    assert err.startswith(f"hexiseq: {message}")
    assert err.count("\n") == 1


def test_a_cluster_with_other_gpus_is_refused(files: Path) -> None:
    nodes = [{"name": "n", "gpus": ["card"] * 3}]
    (files / "three.yaml").write_text(yaml.safe_dump({"nodes": nodes, "gpus": {"card": CARD}}))
    code, _, err = run(files, "--cluster", "three.yaml")
    assert code == 2
    assert "the plan is for 4 ranks and was given 3" in err


def test_an_edited_plan_is_refused(files: Path) -> None:
    content = (files / "plan.json").read_text().replace('"tokens": 600', '"tokens": 601')
    (files / "edited.json").write_text(content)
    code, _, err = run(files, "--plan", "edited.json")
    assert code == 2
    assert "was edited after it was written" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--straggler", "x"], "--straggler is 'x'; it is RANK:FACTOR"),
        (["--seed", "3"], "--seed is 3, and nothing is random without --jitter"),
        (["--straggler", "9:2"], "there is no rank 9; ranks are 0 to 3"),
        (["--straggler", "1:0"], "rank 1 has factor 0.0"),
        (["--straggler", "1:2", "--straggler", "1:3"], "rank 1 stands twice"),
        (["--jitter", "2"], "jitter is 2.0"),
        (["--seed", "-1"], "seed is -1"),
        (["--documents", "30,30"], "documents hold 60 tokens"),
        (["--trace", "absent/step.json"], "--trace is absent/step.json; there is no folder absent"),
        (["--plots", "model.yaml"], "is no folder"),
        (["--oversubscription", "0.5"], "oversubscription is 0.5"),
        (["--mode", "all_gather"], "all_gather is simulated for groups of one rank only"),
    ],
)
def test_bad_conditions_are_refused(files: Path, words: list[str], message: str) -> None:
    code, _, err = run(files, *words)
    assert code == 2
    assert message in err


def test_a_plan_for_other_links_is_refused(files: Path) -> None:
    cluster, model = (files / "cluster.yaml", files / "model.yaml")
    plan = replace(Plan.load(files / "plan.json"), made_from={"cluster": "0" * 64})
    with pytest.raises(PlanError, match="the same GPUs, but other links or rates"):
        simulate_plan(plan, Cluster.load(cluster), ModelSpec.load(model))


def test_a_plan_for_another_model_or_other_documents_is_refused() -> None:
    cluster = Cluster.from_mapping({"nodes": NODES, "gpus": {"card": CARD}})
    made = plan(cluster, MODEL, seq_len=1000, documents=(400, 600), global_batch=1)

    with pytest.raises(PlanError, match="made for another model: the same heads"):
        simulate_plan(made, cluster, replace(MODEL, layers=MODEL.layers + 1))
    with pytest.raises(PlanError, match="made for other documents"):
        simulate_plan(made, cluster, MODEL)
    found = simulate_plan(made, cluster, MODEL, workload_of(made, (400, 600)))
    assert made.predicted is not None
    assert found.cost.step_seconds == made.predicted.step_seconds


def test_an_unknown_mode_is_refused() -> None:
    problem = problem_for(Cluster.from_mapping({"nodes": NODES, "gpus": {"card": CARD}}), MODEL,
                          seq_len=1000)  # fmt: skip
    layout = one_each(250, 250, 250, 250)
    with pytest.raises(ConfigError, match="mode is 'spiral'; one of direct"):
        simulate(evaluate(problem, layout), mode="spiral")  # type: ignore[arg-type]


def test_a_layout_is_simulated_as_it_exchanges() -> None:
    problem = problem_for(Cluster.from_mapping({"nodes": NODES, "gpus": {"card": CARD}}), MODEL,
                          seq_len=1000)  # fmt: skip
    layout = one_each(250, 250, 250, 250)
    modes = {"routes": "direct", "rotation": "async"}
    for exchange in ("routes", "rotation", "double_ring", "all_gather"):
        found = simulate(evaluate(problem, replace(layout, exchange=exchange)))
        assert found.mode == modes.get(exchange, exchange)


# -------------------------------------------------------------------- validation


BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture(scope="module")
def validate() -> ModuleType:
    if str(BENCH) not in sys.path:
        sys.path.append(str(BENCH))
    return importlib.import_module("validate_simulator")


def test_tau_and_regret(validate: ModuleType) -> None:
    assert validate.kendall_tau([1, 2, 3], [10, 20, 30]) == 1
    assert validate.kendall_tau([1, 2, 3], [30, 20, 10]) == -1
    assert validate.kendall_tau([1, 2, 3], [20, 10, 30]) == pytest.approx(1 / 3)
    assert validate.regret([1.0, 2.0], [5, 6]) == 0
    assert validate.regret([1.0, 1.2], [6, 5]) == pytest.approx(0.2)


RATE = {"level": "kernel", "gpu": "card", "head_dim": 16, "tokens": 100}
LINES = [
    {"level": "step", "case": "a", "seq_len": 1400, "recompute": "full"}
    | {"chunk_tokens": 8192, "window": 2, "emulated": [""] * 4, "phases": [], "measured_ms": 1.0}
    | {"replicas": [[[[0, 1], [600, 300], [3, 1]], [[2, 3], [250, 250], [2, 2]]]]},
    RATE | {"case": "b", "flops": {"gemm_forward": 1e9}, "measured_ms": 1.0},
    {"level": "link", "case": "c", "sender": 0, "receiver": 2}
    | {"num_bytes": 8e8, "measured_ms": 1066.6717},
]


def recorded(files: Path, folder: Path, lines: list[dict[str, Any]], validate: ModuleType) -> Path:
    """Add lines of a session to an empty folder; its cluster file is of two GPUs."""
    shape = yaml.safe_load((files / "model.yaml").read_text())
    lines = [{"run": "one", "model": shape} | line for line in lines]
    (folder / "new.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    content = yaml.safe_load((files / "cluster.yaml").read_text())
    content["nodes"] = [{"name": "n", "gpus": ["card", "card"], "intra_gb_per_s": 1.0}]
    (folder / "two.yaml").write_text("# as measured\n" + yaml.safe_dump(content))
    validate.add(folder / "new.jsonl", folder / "two.yaml", folder / "kept", copies=2)
    return folder / "kept"


def test_a_run_that_went_as_simulated_has_no_error(
    validate: ModuleType, files: Path, tmp_path: Path
) -> None:
    folder = recorded(files, tmp_path, LINES, validate)
    kept = validate.read(folder / "runs.jsonl")
    assert [line["fitted_on"] for line in kept] == [2, 2, 2]
    kept[0]["measured_ms"] = validate.predicted_ms(kept[0], folder)
    kept[0]["peak_bytes"] = validate.predicted_peak_bytes(kept[0], folder).tolist()
    (folder / "runs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in kept))

    found = "\n".join(validate.findings(folder, tmp_path / "none.jsonl"))

    for level in ("kernel", "link", "step"):
        assert f"{level}: 1 measured, error 0.0% on average" in found
    assert "layer: nothing was measured" in found
    assert "peak memory, 1 runs: predicted from +0.0% to +0.0%" in found
    for asked in (
        "20 plans, with rates of two GPUs: 1: NOT MET",
        "their time within 8% on average: 0.0%: met",
        "it never 3% under nor 12% over: +0.0% to +0.0%: met",
        "something at the level of a layer: 0: NOT MET",
    ):
        assert f"- {asked}" in found


def test_lines_over_emulated_links_are_predicted_with_them(
    validate: ModuleType, files: Path, tmp_path: Path
) -> None:
    slow = LINES[0] | {"link_gb_per_s": 0.001, "case": "slow"}
    folder = recorded(files, tmp_path, [LINES[0], slow], validate)

    fast, slow = validate.read(folder / "runs.jsonl")
    assert validate.predicted_ms(slow, folder) > 10 * validate.predicted_ms(fast, folder)
    assert validate.transfers_share(slow, folder) > 0.9
    text = (folder / "two.yaml").read_text()
    assert text.startswith("# as measured\n# each GPU that was measured stands here 2 times\n")
    assert Cluster.load(folder / "two.yaml").world_size == 4


def test_the_recorded_runs_can_be_judged(validate: ModuleType) -> None:
    found = "\n".join(validate.findings(validate.FOLDER, validate.RESULTS / "prediction.jsonl"))
    assert "layer:" in found
    assert "Asked for:" in found
