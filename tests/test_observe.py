"""Steps observed on real processes: phases, trace and files, compared plans, slow links."""

from __future__ import annotations

import io
import json
import time
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drawn_problems import EXAMPLES
from pool import TIMEOUT, Pool
from typer.testing import CliRunner

from hexiseq_triton.cli import app
from hexiseq_triton.context import init
from hexiseq_triton.emulation.emulate import Emulation
from hexiseq_triton.errors import ConfigError
from hexiseq_triton.planner import Cluster, Plan, Split
from hexiseq_triton.tracing.compare import compare
from hexiseq_triton.tracing.compare_report import comparison_table, order_lines
from hexiseq_triton.tracing.phases import PHASES
from hexiseq_triton.tracing.record import RecordedRun
from hexiseq_triton.train import train
from hexiseq_triton.training_config import CorpusOptions, TrainingConfig

MODEL = "{layers: 2, hidden: 32, heads: 4, kv_heads: 2, ffn: 48, vocab: 256}"
PLAN = Plan.from_splits(
    [Split((60, 0), (3, 1)), Split((20,), (4,))],
    [Split((40,), (4,))],
    num_kv_heads=2,
    sequences=(2, 1),
    world_size=5,
)
"""Two replicas; rank 1 holds a head and no token, rank 4 is idle."""
CLUSTER = {
    "nodes": [{"name": "a", "gpus": {"slow": 5}}],
    "gpus": {"slow": {"dense_tflops": 1, "memory_gb": 8, "network_gb_per_s": 2}},
}


@pytest.fixture
def config(tmp_path: Path) -> TrainingConfig:
    model = tmp_path / "model.yaml"
    model.write_text(MODEL, encoding="utf-8")
    return TrainingConfig(
        model=str(model),
        steps=4,
        lr=2e-3,
        out=str(tmp_path / "out"),
        timeout_seconds=TIMEOUT.total_seconds(),
        corpus=CorpusOptions(max_document_tokens=300),
    )


def trained(rank: int, config: TrainingConfig, emulation: Emulation | None) -> list[float]:
    """Worker: train on the CPU with a trace."""
    cluster = Cluster.from_mapping(CLUSTER)
    trace = Path(config.out) / "traces" / "trace.json"
    done = train(PLAN, config, "cpu", cluster=cluster, trace=trace, emulation=emulation)
    return [metrics.loss for metrics in done]


def test_a_run_is_observed_on_every_rank(pool: Pool, config: TrainingConfig) -> None:
    pool.run(trained, config, None)

    written = Path(config.out) / "timeline.json"
    run = RecordedRun.load(written)
    later = written.with_name("later.json")
    later.write_text(written.read_text("utf-8").replace('"version": 1', '"version": 2'), "utf-8")
    with pytest.raises(ConfigError, match=r"later.json: version is 2"):
        RecordedRun.load(later)
    assert (run.plan, run.steps, run.emulated) == (PLAN.digest, 2, ("",) * 5)
    for phases, expected in zip(run.measured, run.predicted, strict=True):
        assert tuple(phases) == PHASES == tuple(expected)
        assert 0 < sum(phases.values()) <= run.step_seconds * (1 + 1e-9)
        assert sum(expected.values()) == pytest.approx(run.predicted_step_seconds)
    for rank in (0, 2, 3):
        assert all(run.measured[rank][name] > 0 for name in ("token-wise", "attention", "logits"))
    idle = run.measured[4].pop("idle")
    assert idle > 0
    assert sum(run.measured[4].values()) == 0
    assert run.measured[1]["attention"] > 0
    assert run.measured[2]["exchange"] > 0
    assert run.measured[0]["all-to-all"] > 0
    assert all(0 < share <= 1 for share in run.visible_share)

    events = json.loads((Path(config.out) / "traces" / "trace.json").read_text("utf-8"))[
        "traceEvents"
    ]
    for rank in range(5):
        names = [e["name"] for e in events if e["pid"] == rank and e["ph"] == "X"]
        assert names.count("step") == 2
        assert {"forward", "backward", "layer", "optimizer"} <= set(names)


def test_slow_links_change_no_loss_and_are_named_in_every_file(
    pool: Pool, config: TrainingConfig
) -> None:
    plain = pool.run(trained, config, None)[0]
    slow = replace(config, out=f"{config.out}-slow")
    emulation = Emulation(link_gb_per_s=(1.0, 1.0, 0.001, 1.0, 1.0))

    assert pool.run(trained, slow, emulation)[0] == plain

    run = RecordedRun.load(Path(slow.out) / "timeline.json")
    assert run.emulated[2] == "emulated: links of 0.001 GB/s"
    lines = (Path(slow.out) / "metrics.jsonl").read_text("utf-8").splitlines()
    assert all(json.loads(line)["emulated"].startswith("emulated: ") for line in lines)
    events = json.loads((Path(slow.out) / "traces" / "trace.json").read_text("utf-8"))[
        "traceEvents"
    ]
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes[2] == "rank 2 (emulated: links of 0.001 GB/s)"


def told(rank: int, config: TrainingConfig, cluster: Path, emulation: Emulation) -> str:
    """Worker: what is printed of a run."""
    with redirect_stdout(io.StringIO()) as printed:
        train(PLAN, config, "cpu", cluster=cluster, emulation=emulation)
    return printed.getvalue()


def test_a_prediction_that_is_off_ends_in_the_command_that_measures_this_run_s_model_again(
    pool: Pool, config: TrainingConfig, tmp_path: Path
) -> None:
    cluster = tmp_path / "measured clusters.yaml"
    content = json.loads(json.dumps(CLUSTER))
    content["gpus"]["slow"]["dense_tflops"] = 1e-6  # computing cannot be as predicted
    cluster.write_text(json.dumps(content), encoding="utf-8")
    emulation = Emulation(link_gb_per_s=(1.0, 1.0, 0.5, 1.0, 1.0))

    text = pool.run(told, config, cluster, emulation)[0]

    assert (
        "plan anew: torchrun --nproc-per-node 5 --no-python hexiseq profile "
        f"--model {config.model} --out '{cluster}' --emulate-link-gb-per-s 1,1,0.5,1,1\n"
    ) in text


def delayed(rank: int, gb_per_s: float) -> float:
    """Worker: seconds of one exchange of 100,000 bytes among neighbours over a slow link."""
    ring = Plan.from_splits([Split((1,), (1,))] * 5)
    with init(ring, device="cpu", timeout=TIMEOUT, symmetric_memory=False) as context:
        Emulation(link_gb_per_s=(gb_per_s,) * 5).delay_links(context)
        out, into = torch.full((100_000,), rank, dtype=torch.uint8), torch.zeros(100_000)
        into = into.to(torch.uint8)
        began = time.perf_counter()
        sends, receives = [((rank + 1) % 5, out)], [((rank - 1) % 5, into)]
        first = context.routes.start(sends, receives, "a test")
        second = context.routes.start(sends, receives, "a test")
        first.wait()
        second.wait()
        assert bool((into == (rank - 1) % 5).all())
        return time.perf_counter() - began


def test_transfers_of_a_slow_link_queue_up(pool: Pool) -> None:
    seconds = pool.run(delayed, 0.001)  # 0.1 s each

    assert min(seconds) >= 0.2


def test_what_cannot_be_emulated_is_refused() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(ConfigError, match="has 2 values for 4 ranks"):
        Emulation(sms=(132, 44)).check(4, cpu)
    with pytest.raises(ConfigError, match="need CUDA; this rank runs on cpu"):
        Emulation(sms=(132, 44)).check(2, cpu)
    with pytest.raises(ConfigError, match="'132,x'; it is numbers"):
        Emulation.parse("132,x", None, None)
    with pytest.raises(ConfigError, match="whole numbers"):
        Emulation.parse("1.5", None, None)
    with pytest.raises(ConfigError, match="above 0"):
        Emulation.parse(None, "40,0", None)
    assert Emulation.parse(None, None, None) is None
    given = Emulation.parse("132,44", "80,40.5", None)
    assert given == Emulation((132, 44), (80.0, 40.5))
    assert given.arguments == ["--emulate-sms", "132,44", "--emulate-memory-gb", "80,40.5"]


def compared(rank: int, config: TrainingConfig, plans: list[Plan]) -> list[RecordedRun] | None:
    """Worker: compare plans."""
    cluster = Cluster.from_mapping(CLUSTER)
    return compare(plans, config, torch.device("cpu"), cluster=cluster)


def test_plans_are_compared_on_the_same_ranks(pool: Pool, config: TrainingConfig) -> None:
    ring = Plan.from_splits([Split((24,), (4,))] * 5, num_kv_heads=2)
    results = pool.run(compared, config, [PLAN, ring])

    runs = results[0]
    assert results[1:] == [None] * 4
    assert [run.plan for run in runs] == [PLAN.digest, ring.digest]
    assert RecordedRun.load(Path(config.out) / "plan-2" / "timeline.json") == runs[1]
    table = comparison_table(["ours", "ring"], runs)
    assert [column.header for column in table.columns] == ["phase", "ours", "ring"]
    assert table.row_count == len(PHASES) + 1
    assert str(table.title).endswith("mean of the ranks: measured / predicted")
    outcomes = pool.outcomes(compared, config, [PLAN])
    assert {outcome.kind for outcome in outcomes} == {"ConfigError"}


def with_step(run: RecordedRun, measured: float, predicted: float) -> RecordedRun:
    return replace(run, step_seconds=measured, predicted_step_seconds=predicted)


def test_the_order_is_given_and_pairs_predicted_wrong_are_named() -> None:
    phases = dict.fromkeys(PHASES, 0.1)
    run = RecordedRun("", "", 1, 8, 1, ("cpu",), ("",), ("gloo",), 3, 1.0, (phases,), (1.0,))
    good = [with_step(run, 2.0, 2.1), with_step(run, 1.0, 1.1)]
    assert list(order_lines(["a", "b"], good)) == [
        "measured, fastest first: b (1.00), a (2.00)",
        "the prediction puts all pairs that are more than 5% apart in this order",
    ]
    wrong = [with_step(run, 2.0, 1.0), with_step(run, 1.0, 1.1)]
    assert list(order_lines(["a", "b"], wrong))[1:] == [
        "warning: b was faster than a; predicted the other way round"
    ]
    close = [with_step(run, 1.02, 1.0), with_step(run, 1.0, 1.1)]
    assert not any(line.startswith("warning") for line in order_lines(["a", "b"], close))


def test_plans_of_other_batches_are_not_compared(pool: Pool, config: TrainingConfig) -> None:
    other = Plan.from_splits([Split((60, 61), (3, 1))], num_kv_heads=2, world_size=5)
    outcomes = pool.outcomes(compared, config, [PLAN, other])
    assert {outcome.kind for outcome in outcomes} == {"ConfigError"}
    assert "the plans' steps are of 120, 121 tokens" in outcomes[0].error


def test_a_comparison_that_cannot_be_written_is_refused_before_it_trains(
    pool: Pool, config: TrainingConfig
) -> None:
    outcomes = pool.outcomes(compared, replace(config, out=config.model), [PLAN, PLAN])
    assert {outcome.kind for outcome in outcomes} == {"ConfigError"}
    assert len({outcome.error for outcome in outcomes}) == 1
    assert "plan-1, which is no folder" in outcomes[0].error


@pytest.mark.parametrize("command", ["profile", "doctor", "compare"])
@pytest.mark.parametrize("rank", [None, "0"])
def test_outside_torchrun_the_command_to_type_is_shown(
    command: str, rank: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    given = ["--plan", "p.json", "--config", str(EXAMPLES.parent / "train.yaml")]
    result = CliRunner().invoke(app, [command, *(given if command == "compare" else [])])

    assert result.exit_code == 2
    assert f"torchrun --nproc-per-node 4 --no-python hexiseq {command}" in result.stderr
