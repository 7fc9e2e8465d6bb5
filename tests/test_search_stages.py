"""The stages of the search, one by one: groups, replicas, compositions, and what each adds."""

from __future__ import annotations

from random import Random

import pytest
from drawn_problems import EXAMPLES, SIXTEEN, drawn_problem, problem_for

from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.compositions import composed
from hexiseq_triton.planner.estimate import Estimator
from hexiseq_triton.planner.groupings import groupings
from hexiseq_triton.planner.replicas import allotments
from hexiseq_triton.planner.search import Options, Search
from hexiseq_triton.planner.stages import Splitter


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
