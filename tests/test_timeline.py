"""Phases of a step from spans, the trace, and what is said of predictions that were off."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path

import pytest
import torch
from drawn_problems import EXAMPLES
from rich.console import Console

from hexiseq_triton.errors import PlanError
from hexiseq_triton.planner import Cluster, Plan, Split, plan
from hexiseq_triton.planner.explain import cost_of
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.workload import Workload
from hexiseq_triton.timeline import Span, Timeline
from hexiseq_triton.tracing.perfetto import write_trace
from hexiseq_triton.tracing.phases import (
    COMPUTING,
    PHASES,
    Phases,
    measured_phases,
    predicted_phases,
    visible_share,
)
from hexiseq_triton.tracing.record import Forecast, RecordedRun
from hexiseq_triton.tracing.report import notes, print_recorded, timeline_table, warnings

STEP = [
    Span("step", 0.0, 10.0),
    Span("forward", 1.0, 4.0),
    Span("layer", 1.5, 3.0),
    Span("all-to-all in", 2.0, 0.5),
    Span("attention", 2.5, 1.0),
    Span("wait for keys", 3.5, 0.25),
    Span("send", 2.6, 0.8, stream="exchange"),
    Span("backward", 5.0, 2.0),
    Span("layer", 5.5, 1.0),
    Span("attention backward", 5.6, 0.5),
    Span("optimizer", 7.0, 1.0),
    Span("shard", 0.1, 0.2),
]


def test_every_instant_of_a_step_belongs_to_the_innermost_phase() -> None:
    phases = measured_phases(STEP)

    assert phases == pytest.approx(
        {
            "token-wise": 1.25 + 0.5,
            "attention": 1.5,
            "all-to-all": 0.5,
            "exchange": 0.25,
            "FSDP": 1.0 + 1.0,
            "logits": 0.0,
            "optimizer": 1.0,
            "idle": 10 - 4 - 2 - 1,
        }
    )
    assert sum(phases.values()) == pytest.approx(10.0)


def test_several_steps_are_averaged_and_what_lies_outside_them_is_left_out() -> None:
    later = [Span(s.name, s.start_seconds + 20, s.seconds, s.stream) for s in STEP]
    outside = Span("attention", 12.0, 5.0)

    assert measured_phases([*STEP, outside, *later]) == pytest.approx(measured_phases(STEP))
    with pytest.raises(ValueError, match="no span 'step'"):
        measured_phases([outside])


def test_a_rank_without_tokens_is_idle_all_the_time() -> None:
    phases = measured_phases(STEP, works=False)

    assert phases["idle"] == pytest.approx(10.0)
    assert sum(phases.values()) == pytest.approx(10.0)


def test_a_timeline_records_only_while_enabled() -> None:
    timeline = Timeline(torch.device("cpu"))
    with timeline.span("before"):
        pass
    timeline.enabled = True
    with timeline.span("outer"), timeline.span("inner", stream="exchange"):
        pass
    opened = timeline.start("by hand")
    timeline.stop(opened)

    spans = timeline.spans()
    assert [(s.name, s.stream) for s in spans] == [
        ("outer", "compute"),
        ("inner", "exchange"),
        ("by hand", "compute"),
    ]
    assert spans[1].stop_seconds <= spans[0].stop_seconds
    timeline.clear()
    assert timeline.spans() == []


def test_the_trace_has_a_process_a_rank_and_a_thread_a_stream(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.json", [STEP, []], ["emulated: 44 of 132 SMs", ""])

    events = json.loads((tmp_path / "t.json").read_text("utf-8"))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0 (emulated: 44 of 132 SMs)", 1: "rank 1"}
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == len(STEP)
    (sent,) = [e for e in spans if e["name"] == "send"]
    assert (sent["tid"], sent["ts"], sent["dur"]) == (1, pytest.approx(2.6e6), pytest.approx(8e5))


@pytest.mark.parametrize("what", ["two replicas", "an idle rank"])
def test_predicted_phases_add_up_to_the_step_on_every_rank(what: str) -> None:
    cluster, model = Cluster.load(EXAMPLES / "2-fast-2-slow.yaml"), ModelSpec.load("tiny")
    splits = {
        "two replicas": [[Split((2048, 1024), (6, 2))], [Split((1024, 512), (4, 4))]],
        "an idle rank": [[Split((2048, 512), (6, 2)), Split((512,), (8,))]],
    }[what]
    sequences = (2, 1) if what == "two replicas" else (2,)
    made = Plan.from_splits(*splits, num_kv_heads=4, sequences=sequences, world_size=4)
    batch = sum(sequences)
    workload = Workload(made.seq_len, global_batch=batch, accumulation=1)
    cost = cost_of(made, cluster, model, workload)

    for rank, phases in enumerate(predicted_phases(cost)):
        assert tuple(phases) == PHASES
        assert sum(phases.values()) == pytest.approx(cost.step_seconds)
        computing = sum(phases[name] for name in COMPUTING)
        if what == "an idle rank" and rank == 3:
            assert computing == 0
        else:
            assert computing == pytest.approx(cost.busy_seconds[rank])


def test_visible_share_counts_pairs_of_documents() -> None:
    assert visible_share([8], 8) == 1.0
    assert visible_share([8, 8], 8) == 1.0
    assert visible_share([4, 4, 0], 8) == pytest.approx(20 / 36)
    assert visible_share([], 8) == 1.0


@cache
def made() -> Plan:
    return plan(EXAMPLES / "2-fast-2-slow.yaml", "tiny", seq_len=4096, global_batch=1)


@cache
def forecast(*, phases: bool) -> Forecast:
    cluster = Cluster.load(EXAMPLES / "2-fast-2-slow.yaml") if phases else None
    return Forecast.of(made(), cluster, ModelSpec.load("tiny"))


def test_a_forecast_for_another_cluster_is_refused() -> None:
    cluster = Cluster.load(EXAMPLES / "8xh100-8xa100.yaml")
    with pytest.raises(PlanError, match="the plan is for 4 ranks and was given 16"):
        Forecast.of(made(), cluster, ModelSpec.load("tiny"))


def test_a_plan_predicts_nothing_of_another_model() -> None:
    deeper = replace(ModelSpec.load("tiny"), layers=8)
    assert Forecast.of(made(), None, deeper) == Forecast(None, (None,) * 4)
    with pytest.raises(PlanError, match="made for another model"):
        Forecast.of(made(), Cluster.load(EXAMPLES / "2-fast-2-slow.yaml"), deeper)


def expected_phases() -> list[Phases]:
    return list(forecast(phases=True).phases)


def recorded(measured: list[Phases], *, share: float = 1.0, phases: bool = True) -> RecordedRun:
    """Return a run of what was measured; of what was predicted if that is empty."""
    label = ["", "", "", "emulated: 9 GB"]
    found = measured or expected_phases()
    return RecordedRun.of(
        made(), forecast(phases=phases), 3, found, ["cpu"] * 4, label, ["gloo"] * 4, [share] * 4
    )


def changed(rank: int, factor: float, *names: str) -> list[Phases]:
    """Return what was predicted, but for some phases of one rank."""
    phases = expected_phases()
    phases[rank] = phases[rank] | {name: phases[rank][name] * factor for name in names}
    return phases


def test_a_run_as_predicted_has_no_warning() -> None:
    assert list(warnings(recorded([]))) == []
    assert list(warnings(recorded([], phases=False))) == []


def test_a_rank_that_computes_slower_than_predicted_is_named_with_the_command_to_type() -> None:
    run = recorded(changed(2, 1.4, "token-wise"))

    (line,) = warnings(run)
    assert line.startswith("warning: rank 2 (cpu): token-wise took")
    assert "40% more than predicted" in line
    page = StringIO()
    print_recorded(run, Console(file=page, width=200), "torchrun hexiseq profile")
    text = page.getvalue()
    assert "plan anew: torchrun hexiseq profile" in text
    assert "rank 3 was emulated: 9 GB" in text
    assert "emulated ranks" in text


def test_one_step_is_one_step() -> None:
    assert "1 step measured" in str(timeline_table(replace(recorded([]), steps=1)).title)
    assert "3 steps measured" in str(timeline_table(replace(recorded([]), steps=3)).title)


def test_a_difference_within_the_tolerance_is_not_warned_of() -> None:
    assert list(warnings(recorded(changed(2, 1.1, *COMPUTING)))) == []


def test_without_the_cluster_computing_as_a_whole_is_compared() -> None:
    run = recorded(changed(1, 2.0, *COMPUTING), phases=False)

    (line,) = warnings(run)
    assert line.startswith("warning: rank 1 (cpu): computing took")


def test_a_step_that_is_longer_for_no_rank_s_computing_points_at_the_transfers() -> None:
    slow = [phases | {"exchange": phases["exchange"] + 10.0} for phases in expected_phases()]

    (line,) = warnings(recorded(slow))
    assert "transfers differ" in line


def test_packed_documents_are_compared_with_the_pairs_they_have() -> None:
    packed = [phases | {"attention": phases["attention"] * 0.25} for phases in expected_phases()]
    run = recorded(packed, share=0.25)

    assert list(warnings(run)) == []
    assert any("25.0% of the pairs" in line for line in notes(run))
    assert list(warnings(recorded(packed)))


def test_a_recorded_run_survives_its_file(tmp_path: Path) -> None:
    for phases in (True, False):
        run = recorded([], phases=phases)
        run.save(tmp_path / "deep" / "timeline.json")
        assert RecordedRun.load(tmp_path / "deep" / "timeline.json") == run
