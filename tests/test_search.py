"""The planner from end to end: valid, within memory, never worse than a baseline, and honest."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from drawn_problems import EXAMPLES, drawn_cluster, drawn_problem, problem_for

from hexiseq_triton.errors import ConfigError, InfeasibleError, PlanError
from hexiseq_triton.planner.capacity import longest_seq_len
from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.compositions import composed
from hexiseq_triton.planner.estimate import Estimator
from hexiseq_triton.planner.groupings import groupings
from hexiseq_triton.planner.layouts import BASELINES
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.plans import ExchangePlan, Plan
from hexiseq_triton.planner.replicas import allotments
from hexiseq_triton.planner.resplitting import resplit
from hexiseq_triton.planner.search import Options, Search
from hexiseq_triton.planner.simulator import simulate_plan
from hexiseq_triton.planner.solve import max_seq_len, plan
from hexiseq_triton.planner.stages import Splitter

MODEL = ModelSpec(layers=4, hidden=1024, heads=12, kv_heads=6, head_dim=64, ffn=4096, vocab=1000)
TWO_AND_TWO = EXAMPLES / "2-fast-2-slow.yaml"
SIXTEEN = EXAMPLES / "8xh100-8xa100.yaml"


def step_seconds(result: Plan) -> float:
    assert result.predicted is not None
    return result.predicted.step_seconds


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


# -------------------------------------------------------------------- the stages


def test_slow_gpus_join_in_groups_as_fast_as_a_fast_one() -> None:
    found = groupings([(0, 1), (2, 3, 4, 5, 6, 7)], [3.0] * 2 + [1.0] * 6, [0] * 2 + [1] * 6, 32)

    assert found[((0,), (1,), (2, 3, 4), (5, 6, 7))].endswith("as fast as 1")
    assert ((0, 1), (2, 3, 4, 5, 6, 7)) in found  # as fast as two, and one group a node


@pytest.mark.parametrize("seed", range(10))
def test_every_grouping_holds_every_rank_once(seed: int) -> None:
    problem = drawn_problem(Random(seed))
    splitter, world = Splitter(problem), problem.cluster.world_size
    nodes = tuple(problem.cluster.ranks_by_node.values())

    found = groupings(nodes, splitter.alone, splitter.kind, problem.model.heads)
    assert len(found) >= min(world, 4) - 1
    for grouping in found:
        assert sorted(rank for group in grouping for rank in group) == list(range(world))
        assert world <= 5 or max(map(len, grouping)) <= problem.model.heads


@pytest.mark.parametrize("seed", range(10))
def test_allotments_give_no_rank_twice_and_every_sequence_once(seed: int) -> None:
    problem = drawn_problem(Random(seed))

    found = allotments(problem, Splitter(problem))
    assert found
    for allotment in found:
        ranks = [rank for pool in allotment.pools for rank in pool.ranks]
        assert len(ranks) == len(set(ranks)) <= problem.cluster.world_size
        sequences = sum(pool.sequences for pool in allotment.pools)
        assert sequences * allotment.accumulation == problem.workload.global_batch


def test_no_layout_of_an_allotment_is_faster_than_its_bound() -> None:
    problem = problem_for(Cluster.load(SIXTEEN), "7b", seq_len=131072)
    search = Search(problem)
    for allotment in allotments(problem, search.splitter)[:20]:
        assert search._first(allotment).step_seconds >= allotment.seconds


def test_the_program_composes_groups_that_finish_in_time_by_the_estimate() -> None:
    problem = problem_for(Cluster.load(EXAMPLES / "128-gpus-4-models.yaml"), "7b", seq_len=131072)
    estimator = Estimator(Splitter(problem))
    nodes = tuple(problem.cluster.ranks_by_node.values())[::4]
    ranks = [rank for node in nodes for rank in node]
    alone = tuple((rank,) for rank in ranks)
    known, _ = estimator.estimated(alone, 131072, "balanced")

    found = composed(estimator, nodes, 131072, known)
    assert found
    for chosen in found:
        assert sorted(rank for group in chosen for rank in group) == sorted(ranks)
        assert len({len(group) for group in chosen}) > 1 or len(chosen) < len(ranks)
    assert estimator.estimated(found[-1], 131072, "balanced")[0] < known
    assert composed(estimator, nodes, 131072, known / 100) == []


@pytest.mark.parametrize("stage", ["compositions", "replicas", "across_nodes", "moves"])
def test_leaving_a_stage_out_gives_no_better_layout(stage: str) -> None:
    problem = problem_for(Cluster.load(SIXTEEN), "7b", seq_len=32768)

    less = Search(problem, Options(**{stage: False})).best()
    assert less.fits
    assert Search(problem).best().step_seconds <= less.step_seconds * 1.001


@pytest.mark.parametrize("strategy", ["descent_proportional", "descent_sqrt"])
def test_the_search_beats_coordinate_descent(strategy: str) -> None:
    ours, theirs = (
        plan(SIXTEEN, "7b", seq_len=65536, strategy=name) for name in ("hexiseq", strategy)
    )
    assert theirs.strategy == strategy
    assert step_seconds(ours) < step_seconds(theirs)


# -------------------------------------------------------------------- another batch


def test_a_resplit_plan_keeps_its_groups_and_holds_the_new_tokens() -> None:
    cluster, model = Cluster.load(SIXTEEN), ModelSpec.load("7b")
    first = plan(cluster, model, seq_len=131072)
    again = resplit(first, cluster, model, seq_len=50001)

    assert again.seq_len == 50001
    for old, new in zip(first.replicas, again.replicas, strict=True):
        assert [[s.rank for s in g.ranks] for g in old.groups] == [
            [s.rank for s in g.ranks] for g in new.groups
        ]
        assert new.tokens == new.sequences * 50001
    assert step_seconds(again) < step_seconds(first)


def test_resplitting_keeps_to_the_plans_share_of_memory() -> None:
    cluster, model = Cluster.load(SIXTEEN), ModelSpec.load("7b")
    first = plan(cluster, model, seq_len=65536, memory_limit_share=0.6)
    limits = {share.rank: share.memory_limit_bytes for share in first.shares}

    again = resplit(first, cluster, model, seq_len=50001)
    assert {share.rank: share.memory_limit_bytes for share in again.shares} == limits
    more = resplit(first, cluster, model, seq_len=50001, memory_limit_share=0.9)
    assert all(share.memory_limit_bytes > limits[share.rank] for share in more.shares)


def test_resplitting_refuses_another_cluster_or_model_and_what_does_not_fit() -> None:
    cluster, model = Cluster.load(TWO_AND_TWO), ModelSpec.load("tiny")
    first = plan(cluster, model, seq_len=4096)

    with pytest.raises(PlanError, match="the plan is for 4 ranks and was given 16"):
        resplit(first, Cluster.load(SIXTEEN), model, seq_len=5000)
    with pytest.raises(PlanError, match="made for another model"):
        resplit(first, cluster, replace(model, layers=5), seq_len=5000)
    with pytest.raises(InfeasibleError, match="seq_len 1000000000 does not fit: out of memory"):
        resplit(first, cluster, model, seq_len=10**9)


def test_resplitting_for_the_same_batch_is_about_as_good_as_the_plan() -> None:
    cluster, model = Cluster.load(SIXTEEN), ModelSpec.load("7b")
    first = plan(cluster, model, seq_len=131072)

    same = resplit(first, cluster, model, seq_len=131072)
    assert step_seconds(same) == pytest.approx(step_seconds(first), rel=0.01)


def test_a_batch_of_documents_is_resplit_by_their_real_work() -> None:
    cluster, model = Cluster.load(TWO_AND_TWO), ModelSpec.load("tiny")
    first = plan(cluster, model, seq_len=4096)

    packed = resplit(first, cluster, model, seq_len=4096, documents=(2000, 1000, 1096))
    assert step_seconds(packed) < step_seconds(first)
