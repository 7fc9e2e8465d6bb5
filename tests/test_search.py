"""The planner from end to end: never worse than a baseline, valid, within memory, reproducible."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from drawn_problems import EXAMPLES, drawn_cluster, drawn_problem, problem_for

from hexiseq_triton.errors import ConfigError, InfeasibleError
from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.cost import evaluate
from hexiseq_triton.planner.groupings import groupings
from hexiseq_triton.planner.layouts import BASELINES, price
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.plans import Plan
from hexiseq_triton.planner.problem import Group, Layout, Problem
from hexiseq_triton.planner.solve import plan

MODEL = ModelSpec(layers=4, hidden=1024, heads=12, kv_heads=6, head_dim=64, ffn=4096, vocab=1000)
TWO_AND_TWO = EXAMPLES / "2-fast-2-slow.yaml"
SIXTEEN = EXAMPLES / "8xh100-8xa100.yaml"


def layout_of(plan: Plan) -> Layout:
    """Return the layout a plan writes down."""
    groups = [
        Group(
            tuple(share.rank for share in group.ranks),
            tuple(share.tokens for share in group.ranks),
            tuple(share.num_q_heads for share in group.ranks),
        )
        for group in plan.replicas[0].groups
    ]
    return Layout("", tuple(groups), plan.exchange.arrangement)


@pytest.mark.parametrize("seed", range(20))
def test_plan_is_valid_within_memory_and_never_worse_than_a_baseline(seed: int) -> None:
    rng = Random(seed)
    cluster, seq_len = drawn_cluster(rng), rng.choice([3, 1000, 16384, 131072])
    result = plan(cluster, MODEL, seq_len=seq_len)

    assert result.predicted is not None
    assert result.lower_bound_seconds is not None
    step = result.predicted.step_seconds
    assert step >= result.lower_bound_seconds or result.exchange.arrangement == "contiguous"
    assert set(result.baselines) == set(BASELINES)
    for baseline in result.baselines.values():
        if baseline.step_seconds is None:
            assert baseline.reason
        else:
            assert step <= baseline.step_seconds
    for share in result.shares:
        assert share.memory_bytes is not None
        assert share.memory_limit_bytes is not None
        assert share.memory_bytes <= share.memory_limit_bytes
    assert {share.rank for share in result.shares} == set(range(cluster.world_size))


@pytest.mark.parametrize("seed", range(5))
def test_prediction_is_the_evaluators_for_the_layout_in_the_plan(seed: int) -> None:
    cluster = drawn_cluster(Random(seed))
    result = plan(cluster, MODEL, seq_len=32768)

    cost = evaluate(problem_for(cluster, MODEL, seq_len=32768), layout_of(result))
    assert result.predicted is not None
    assert cost.step_seconds == result.predicted.step_seconds


def test_a_mixed_cluster_gains_over_equal_splits_and_nears_its_bound() -> None:
    result = plan(SIXTEEN, "7b", seq_len=131072)

    assert result.gap is not None
    assert result.predicted is not None
    assert result.gap < 0.05
    zigzag = result.baselines["zigzag_ring"].step_seconds
    assert zigzag is not None
    assert zigzag > 1.5 * result.predicted.step_seconds


def test_equal_gpus_get_equal_shares() -> None:
    node = {"name": "a", "count": 2, "gpus": {"H100-SXM": 4}}
    cluster = Cluster.from_mapping({"nodes": [node], "inter_gb_per_s": 50})

    shares = plan(cluster, "7b", seq_len=65536).shares
    assert {share.tokens for share in shares} == {65536 // 8}


def test_the_example_of_two_fast_and_two_slow_makes_groups_of_three_and_one() -> None:
    result = plan(TWO_AND_TWO, "tiny", seq_len=4096)

    groups = result.replicas[0].groups
    assert [len(group.ranks) for group in groups] == [3, 1]
    assert [share.num_q_heads for share in groups[0].ranks] == [4, 2, 2]
    assert groups[0].tokens > groups[1].tokens


def test_groups_end_together_with_communication_counted() -> None:
    result = plan(TWO_AND_TWO, "tiny", seq_len=4096)
    problem = problem_for(Cluster.load(TWO_AND_TWO), "tiny", seq_len=4096)

    seconds = evaluate(problem, layout_of(result)).group_seconds
    assert seconds.max() < 1.01 * seconds.min()
    # node a has two thirds of the speed, and gets less: it has the all-to-all to pay as well
    assert result.replicas[0].groups[0].tokens < 2 * 4096 // 3 - 16


def test_a_gpu_with_little_memory_takes_fewer_tokens_than_its_speed_asks_for() -> None:
    def tokens(memory_gb: float) -> int:
        cards = {
            "big": {"dense_tflops": 100, "memory_gb": 80, "network_gb_per_s": 100},
            "small": {"dense_tflops": 100, "memory_gb": memory_gb, "network_gb_per_s": 100},
        }
        node = {"name": "a", "gpus": ["big", "small"]}
        cluster = Cluster.from_mapping({"nodes": [node], "gpus": cards})
        return plan(cluster, MODEL, seq_len=1 << 20).shares[-1].tokens

    assert tokens(80) == 1 << 19
    assert 0 < tokens(12) < 1 << 18


def test_baselines_are_what_their_names_say() -> None:
    cluster = drawn_cluster(Random(1))
    world = cluster.world_size
    model = replace(MODEL, heads=2 * world, kv_heads=2)

    for name, sizes in (("ring", {1}), ("zigzag_ring", {1}), ("ulysses", {world})):
        result = plan(cluster, model, seq_len=8000, strategy=name)
        assert {len(group.ranks) for group in result.replicas[0].groups} == sizes
        assert (result.exchange.arrangement == "contiguous") == (name == "ring")
        assert len({share.num_q_heads for share in result.shares}) == 1
        tokens = {share.tokens for share in result.shares}
        assert max(tokens) - min(tokens) <= 1
    usp = plan(cluster, model, seq_len=8000, strategy="usp")
    assert usp.predicted is not None
    assert usp.baselines["usp"].step_seconds == usp.predicted.step_seconds
    assert str(usp.baselines["usp"].reason).startswith("cp ")


def test_ulysses_says_why_heads_do_not_fit() -> None:
    cluster = Cluster.from_mapping({"nodes": [{"name": "a", "gpus": {"L4": 5}}]})

    priced = price(problem_for(cluster, MODEL, seq_len=1000), "ulysses")
    assert priced.cost is None
    assert priced.reason == "12 query heads do not divide by 5 ranks"


def test_out_of_memory_names_the_gpu_and_the_longest_sequence() -> None:
    with pytest.raises(InfeasibleError) as caught:
        plan(SIXTEEN, "13b", seq_len=8 << 20)

    message = str(caught.value)
    assert "seq_len 8388608 does not fit" in message
    assert "(H100-SXM of node h100) needs" in message or "A100-SXM-80GB" in message
    longest = int(message.rsplit(" ", 1)[1])
    assert plan(SIXTEEN, "13b", seq_len=longest).seq_len == longest
    with pytest.raises(InfeasibleError):
        plan(SIXTEEN, "13b", seq_len=longest + longest // 50)


def test_a_model_that_never_fits_is_told_so() -> None:
    with pytest.raises(InfeasibleError, match="no seq_len fits"):
        plan(TWO_AND_TWO, "70b", seq_len=4096)


def test_a_baseline_asked_for_that_cannot_run_gives_its_reason() -> None:
    with pytest.raises(InfeasibleError, match="ulysses: 40 query heads do not divide by 16 ranks"):
        plan(SIXTEEN, "13b", seq_len=4096, strategy="ulysses")


@pytest.mark.parametrize(
    ("wrong", "needle"),
    [
        ({"strategy": "magic"}, "strategy is 'magic'; it is one of hexiseq, ring"),
        ({"seq_len": 0}, "seq_len is 0"),
        ({"accumulation": 3}, "does not divide by accumulation 3"),
        ({"recompute": "half"}, "recompute is 'half'"),
    ],
)
def test_wrong_arguments_are_named(wrong: dict[str, object], needle: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(SIXTEEN, "7b", **({"seq_len": 4096} | wrong))  # type: ignore[arg-type]

    assert needle in str(caught.value)


def test_a_card_that_cannot_run_is_refused() -> None:
    cluster = Cluster.from_mapping({"nodes": [{"name": "a", "gpus": {"V100-SXM-32GB": 2}}]})

    with pytest.raises(InfeasibleError, match="V100-SXM-32GB cannot run"):
        plan(cluster, "tiny", seq_len=128)


def test_several_sequences_a_pass_form_one_stream() -> None:
    result = plan(SIXTEEN, "7b", seq_len=8192, accumulation=2)

    assert result.replicas[0].sequences == 4
    assert result.replicas[0].tokens == 4 * 8192
    assert result.global_batch == 8


@pytest.mark.parametrize("seed", range(10))
def test_every_grouping_holds_every_rank_once(seed: int) -> None:
    problem: Problem = drawn_problem(Random(seed))
    world = problem.cluster.world_size

    found = groupings(problem.cluster, problem.rates.gemm.tolist())
    assert len(found) >= min(world, 4) - 1
    for grouping in found:
        assert sorted(rank for group in grouping for rank in group) == list(range(world))


def test_same_bytes_for_every_hash_seed_and_order_of_keys(tmp_path: Path) -> None:
    shuffled = tmp_path / "shuffled.yaml"
    nodes = "nodes:\n- {gpus: {L40S: 2, H100-SXM: 2}, name: a}\n- {name: b, gpus: {L40S: 1}}\n"
    shuffled.write_text(nodes + "inter_gb_per_s: 25\n", encoding="utf-8")
    plain = tmp_path / "plain.yaml"
    nodes = "nodes:\n- {name: a, gpus: {H100-SXM: 2, L40S: 2}}\n- {gpus: {L40S: 1}, name: b}\n"
    plain.write_text("inter_gb_per_s: 25\n" + nodes, encoding="utf-8")
    code = (
        "import sys; from hexiseq_triton.planner import plan\n"
        "print(plan(sys.argv[1], '3b', seq_len=30000).to_json(), end='')"
    )

    files = set()
    for seed, path in (("0", plain), ("1", plain), ("2", shuffled)):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", code, str(path)]
        ran = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, check=True
        )
        files.add(ran.stdout)
    assert len(files) == 1
    assert b"digest" in files.pop()


def test_a_plan_file_loads_as_the_same_plan(tmp_path: Path) -> None:
    result = plan(TWO_AND_TWO, "tiny", seq_len=4096)
    result.save(tmp_path / "plan.json")

    assert Plan.load(tmp_path / "plan.json").digest == result.digest


def test_planning_imports_no_torch_and_no_solver_before_it_is_needed(tmp_path: Path) -> None:
    code = (
        "import sys, hexiseq_triton.planner, hexiseq_triton.cli_plan\n"
        "print(sorted({'torch', 'triton', 'mip'} & set(sys.modules)))"
    )
    # not in the repository's root, where `hexiseq_triton` is a folder and not the package
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True).stdout

    assert printed.strip() == b"[]"
