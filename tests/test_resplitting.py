"""A plan resplit for another batch: it keeps its groups and memory, and says what forbids it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from drawn_problems import SIXTEEN, TWO_AND_TWO, step_seconds

from hexiseq_triton.errors import ConfigError, InfeasibleError, PlanError
from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.resplitting import resplit
from hexiseq_triton.planner.solve import plan


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


def test_resplitting_takes_the_names_and_paths_that_planning_takes(tmp_path: Path) -> None:
    first = plan(TWO_AND_TWO, "tiny", seq_len=4096)
    first.save(tmp_path / "plan.json")

    again = resplit(str(tmp_path / "plan.json"), TWO_AND_TWO, "tiny", seq_len=5000)
    assert again == resplit(first, Cluster.load(TWO_AND_TWO), ModelSpec.load("tiny"), seq_len=5000)
    with pytest.raises(ConfigError, match="model is 'tinny'; presets near it: tiny"):
        resplit(first, TWO_AND_TWO, "tinny", seq_len=5000)


def test_resplitting_keeps_to_the_plans_share_of_memory() -> None:
    cluster, model = Cluster.load(SIXTEEN), ModelSpec.load("7b")
    first = plan(cluster, model, seq_len=65536, memory_limit_share=0.6)
    limits = {share.rank: share.memory_limit_bytes for share in first.shares}

    again = resplit(first, cluster, model, seq_len=50001)
    assert {share.rank: share.memory_limit_bytes for share in again.shares} == limits
    more = resplit(first, cluster, model, seq_len=50001, memory_limit_share=0.9)
    assert all(share.memory_limit_bytes > limits[share.rank] for share in more.shares)


@pytest.mark.parametrize("share", [0, 7, -0.5, float("nan")])
def test_resplitting_refuses_more_memory_than_there_is(share: float) -> None:
    first = plan(TWO_AND_TWO, "tiny", seq_len=4096)

    with pytest.raises(ConfigError, match=f"memory_limit_share is {share}; it is above 0 and up"):
        resplit(first, TWO_AND_TWO, "tiny", seq_len=5000, memory_limit_share=share)


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


def test_resplitting_never_does_worse_than_the_plans_own_proportions() -> None:
    """Two equal nodes on a slow network: the search gives one of them two thirds of the tokens."""
    nodes = [{"name": "n", "count": 2, "gpus": {"H100-SXM": 8}}]
    cluster = Cluster.from_mapping({"nodes": nodes, "inter_gb_per_s": 0.125})
    model = ModelSpec.load("llama3-8b")
    first = plan(cluster, model, seq_len=1_000_000, global_batch=1)
    assert first.replicas[0].groups[0].tokens > 600_000

    same = resplit(first, cluster, model, seq_len=1_000_000)
    assert step_seconds(same) <= step_seconds(first)
    half = resplit(first, cluster, model, seq_len=500_001)
    assert half.replicas[0].tokens == 500_001
    assert step_seconds(half) < step_seconds(first)


def test_resplitting_leaves_a_plan_that_cannot_run_what_it_is() -> None:
    old = Cluster.from_mapping({"nodes": [{"name": "n", "gpus": {"V100-SXM-32GB": 8}}]})
    looked_at = plan(old, "3b", seq_len=8192, what_if=True)
    again = resplit(looked_at, old, "3b", seq_len=4096)
    with pytest.raises(PlanError, match="V100-SXM-32GB cannot run this package's kernels"):
        again.check_executable()

    cluster = Cluster.load(SIXTEEN)
    rotating = plan(cluster, "7b", seq_len=65536, strategy="megatron_p2p")
    same = resplit(rotating, cluster, "7b", seq_len=65536)
    assert (same.exchange, same.executable) == (rotating.exchange, False)
    assert step_seconds(same) <= step_seconds(rotating)


def test_a_batch_of_documents_is_resplit_by_their_real_work() -> None:
    cluster, model = Cluster.load(TWO_AND_TWO), ModelSpec.load("tiny")
    first = plan(cluster, model, seq_len=4096)

    packed = resplit(first, cluster, model, seq_len=4096, documents=(2000, 1000, 1096))
    assert step_seconds(packed) < step_seconds(first)
