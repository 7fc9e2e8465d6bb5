"""The planner from end to end: valid, within memory, never worse than a baseline, and honest."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from drawn_problems import SIXTEEN, TWO_AND_TWO, drawn_cluster, problem_for, step_seconds

from hexiseq_triton.errors import ConfigError, InfeasibleError
from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.layouts import BASELINES
from hexiseq_triton.planner.longest import longest_seq_len
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.plans import ExchangePlan, Plan
from hexiseq_triton.planner.simulator import simulate_plan
from hexiseq_triton.planner.solve import max_seq_len, plan

MODEL = ModelSpec(layers=4, hidden=1024, heads=12, kv_heads=6, head_dim=64, ffn=4096, vocab=1000)


# -------------------------------------------------------------------- every plan


@pytest.mark.parametrize("seed", range(12))
def test_plan_is_valid_within_memory_and_never_worse_than_a_baseline(seed: int) -> None:
    rng = Random(seed)
    cluster, seq_len = drawn_cluster(rng), rng.choice([3, 1000, 16384, 131072])
    result = plan(cluster, MODEL, seq_len=seq_len, global_batch=rng.choice([1, 3, 8]))

    result.validate()
    assert result.lower_bound_seconds is not None
    assert step_seconds(result) >= result.lower_bound_seconds
    assert set(result.baselines) == set(BASELINES)
    for baseline in result.baselines.values():
        if baseline.step_seconds is None:
            assert baseline.reason
        elif baseline.executable:
            assert step_seconds(result) <= baseline.step_seconds * (1 + 1e-9)
    for share in result.shares:
        assert share.memory_bytes is not None
        assert share.memory_limit_bytes is not None
        assert share.memory_bytes <= share.memory_limit_bytes


def test_equal_gpus_get_equal_shares() -> None:
    node = {"name": "a", "count": 2, "gpus": {"H100-SXM": 4}}
    cluster = Cluster.from_mapping({"nodes": [node], "inter_gb_per_s": 50})

    result = plan(cluster, "7b", seq_len=65536)
    assert len({share.tokens for share in result.shares}) == 1
    assert len(result.shares) == 8


def test_gpus_of_two_speeds_are_used_far_better_than_by_equal_shares() -> None:
    result = plan(SIXTEEN, "7b", seq_len=131072)
    assert result.gap is not None
    assert result.gap < 0.05
    zigzag = result.baselines["zigzag_ring"].step_seconds
    assert zigzag is not None
    assert zigzag > 1.5 * step_seconds(result)


def test_a_gpu_with_little_memory_takes_fewer_tokens_than_its_speed_asks_for() -> None:
    def tokens(memory_gb: float) -> dict[str | None, int]:
        cards = {
            "big": {"dense_tflops": 100, "memory_gb": 80, "network_gb_per_s": 100},
            "small": {"dense_tflops": 100, "memory_gb": memory_gb, "network_gb_per_s": 100},
        }
        node = {"name": "a", "gpus": ["big", "small"]}
        cluster = Cluster.from_mapping({"nodes": [node], "gpus": cards})
        found = plan(cluster, MODEL, seq_len=1 << 19, global_batch=1)
        return {share.gpu: share.tokens for share in found.shares}

    assert tokens(80)["big"] == pytest.approx(1 << 18, rel=0.01)
    assert tokens(12)["small"] < 1 << 17


def test_several_sequences_a_pass_are_dealt_to_replicas() -> None:
    result = plan(SIXTEEN, "7b", seq_len=8192, accumulation=2)

    assert sum(replica.sequences for replica in result.replicas) == 4
    assert all(replica.tokens == replica.sequences * 8192 for replica in result.replicas)
    assert result.global_batch == 8


def test_a_plan_file_loads_as_the_same_plan(tmp_path: Path) -> None:
    result = plan(TWO_AND_TWO, "tiny", seq_len=4096)
    result.save(tmp_path / "plan.json")

    assert Plan.load(tmp_path / "plan.json").digest == result.digest


@pytest.mark.parametrize("strategy", ["descent_proportional", "descent_sqrt"])
def test_the_search_beats_coordinate_descent(strategy: str) -> None:
    ours, theirs = (
        plan(SIXTEEN, "7b", seq_len=65536, strategy=name) for name in ("hexiseq", strategy)
    )
    assert theirs.strategy == strategy
    assert step_seconds(ours) < step_seconds(theirs)


# -------------------------------------------------------------------- what is said


def test_out_of_memory_names_the_gpu_and_the_longest_sequence() -> None:
    with pytest.raises(InfeasibleError) as caught:
        plan(SIXTEEN, "13b", seq_len=8 << 20)

    message = str(caught.value)
    assert "seq_len 8388608 does not fit" in message
    assert "of node h100) needs" in message or "of node a100) needs" in message
    longest = int(message.rsplit(" ", 1)[1])
    assert longest == longest_seq_len(problem_for(Cluster.load(SIXTEEN), "13b", seq_len=1))


def test_the_longest_sequence_fits_and_a_little_longer_does_not() -> None:
    result = max_seq_len(SIXTEEN, "13b", global_batch=1)

    assert step_seconds(result) > 0
    assert result.seq_len > 1_000_000
    with pytest.raises(InfeasibleError):
        plan(SIXTEEN, "13b", seq_len=result.seq_len + result.seq_len // 50, global_batch=1)


def test_a_lower_memory_limit_makes_shorter_sequences() -> None:
    cluster = Cluster.load(TWO_AND_TWO)
    longest = [
        max_seq_len(cluster, "tiny", memory_limit_share=share).seq_len for share in (0.5, 0.95)
    ]
    assert 0 < longest[0] < longest[1]


def test_a_model_that_never_fits_is_told_so() -> None:
    with pytest.raises(InfeasibleError, match="no seq_len fits"):
        plan(TWO_AND_TWO, "70b", seq_len=4096)


@pytest.mark.parametrize(
    ("wrong", "needle"),
    [
        ({"strategy": "magic"}, "strategy is 'magic'; it is one of hexiseq, simulated, descent"),
        ({"seq_len": 0}, "seq_len is 0"),
        ({"accumulation": 3}, "does not divide by accumulation 3"),
        ({"recompute": "half"}, "recompute is 'half'"),
        ({"documents": (4000, 95)}, "hold 4095 tokens and seq_len is 4096"),
        ({"memory_limit_share": 1.5}, "memory_limit_share is 1.5"),
    ],
)
def test_wrong_arguments_are_named(wrong: dict[str, object], needle: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(SIXTEEN, "7b", **({"seq_len": 4096} | wrong))  # type: ignore[arg-type]

    assert needle in str(caught.value)


def test_a_card_that_cannot_run_is_planned_only_to_be_looked_at() -> None:
    cluster = Cluster.from_mapping({"nodes": [{"name": "a", "gpus": {"V100-SXM-32GB": 2}}]})
    with pytest.raises(InfeasibleError, match="V100-SXM-32GB cannot run"):
        plan(cluster, "tiny", seq_len=128)

    result = plan(cluster, "tiny", seq_len=128, what_if=True)
    assert not result.executable
    assert any("V100-SXM-32GB" in note for note in result.notes)


def test_a_plan_cut_short_says_so() -> None:
    assert not plan(SIXTEEN, "7b", seq_len=32768).notes

    short = plan(SIXTEEN, "7b", seq_len=32768, time_limit_seconds=0.0)
    assert any("cut short by its time limit" in note for note in short.notes)


def test_the_simulator_chooses_no_slower_a_layout_than_the_cost_model() -> None:
    cluster, model = Cluster.load(SIXTEEN), ModelSpec.load("13b")
    simulated, searched = (
        plan(cluster, model, seq_len=131072, strategy=strategy)
        for strategy in ("simulated", "hexiseq")
    )
    seconds = [
        simulate_plan(each, cluster, model, engine="event").step_seconds
        for each in (simulated, searched)
    ]
    assert seconds[0] <= seconds[1]
    assert simulated.executable
    assert simulated.predicted is not None
    (note,) = simulated.notes
    assert note.startswith(f"chosen by the simulator: there a step takes {seconds[0]:.4g} s")

    with pytest.raises(ConfigError, match="leave the limit out, or take 'hexiseq'"):
        plan(cluster, model, seq_len=4096, strategy="simulated", time_limit_seconds=1.0)
    with pytest.raises(InfeasibleError, match="seq_len 100000000 does not fit"):
        plan(cluster, model, seq_len=100_000_000, strategy="simulated")


def test_the_simulator_fetches_further_ahead_where_nics_are_slow() -> None:
    nodes = [{"name": gpu, "gpus": {gpu: 8}} for gpu in ("H100-SXM", "A100-SXM-80GB")]
    cluster = Cluster.from_mapping({"inter_gb_per_s": 3, "nodes": nodes})
    model = ModelSpec.load("13b")
    wide = plan(cluster, model, seq_len=262144, strategy="simulated")
    narrow = replace(wide, exchange=replace(wide.exchange, window=ExchangePlan().window))
    seconds = [
        simulate_plan(each, cluster, model, engine="event").step_seconds for each in (wide, narrow)
    ]
    assert wide.exchange.window > narrow.exchange.window
    assert seconds[0] < 0.95 * seconds[1]


def test_a_plan_for_documents_is_called_heuristic() -> None:
    documents = (3000, 1000, 96)
    result = plan(TWO_AND_TWO, "tiny", seq_len=4096, documents=documents)

    assert any("heuristic" in note for note in result.notes)
    assert step_seconds(result) < step_seconds(plan(TWO_AND_TWO, "tiny", seq_len=4096))


def test_planning_imports_no_torch_and_no_solver_before_it_is_needed(tmp_path: Path) -> None:
    code = (
        "import sys, hexiseq_triton.planner, hexiseq_triton.commands.plan\n"
        "print(sorted({'torch', 'triton', 'mip', 'numba'} & set(sys.modules)))"
    )
    # not in the repository's root, where `hexiseq_triton` is a folder and not the package
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True).stdout

    assert printed.strip() == b"[]"
