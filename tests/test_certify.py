"""CBC's proof of the split inside a group, held against every split of the group."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from brute_force import Structure, choices
from drawn_problems import EXAMPLES, problem_for
from tiny_problems import tiny_problem

from hexiseq_triton.planner import plan
from hexiseq_triton.planner.certify import certify
from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.cost import Cost, evaluate
from hexiseq_triton.planner.explain import cost_of
from hexiseq_triton.planner.problem import Group, Layout, Replica

ROUNDING = 1 + 1e-6


def seconds_of_first_group(cost: Cost) -> float:
    """Return one layer and its share of the logits, of a layout's first group."""
    logits = cost.logits_seconds[cost.rows.group == 0].max() / cost.problem.model.layers
    return float(cost.group_seconds[0] + logits)


@pytest.mark.parametrize("seed", range(6))
def test_no_split_of_a_group_beats_what_is_proved(seed: int) -> None:
    rng = Random(seed)
    problem = tiny_problem(rng)
    while problem.cluster.world_size != 3:
        problem = tiny_problem(rng)
    members: tuple[tuple[int, ...], ...] = ((0, 1, 2),) if seed % 2 else ((0, 1), (2,))
    structure = Structure((members,), (problem.workload.global_batch,), 1, "balanced")
    batch = choices(problem, structure, 1)
    in_group = batch.tokens[:, : len(members[0])].sum(axis=1)
    total = int(rng.choice(in_group[in_group > 2].tolist()))
    costs = [
        evaluate(problem, layout)
        for index in np.flatnonzero(in_group == total)
        for layout in batch.layouts(index)
    ]
    fitting = [cost for cost in costs if cost.fits] or costs
    best = min(fitting, key=seconds_of_first_group)

    for started in (best, *rng.sample(fitting, min(5, len(fitting)))):
        proved = certify(started)[0]
        assert proved.seconds == pytest.approx(seconds_of_first_group(started))
        if best.fits:
            assert proved.proved_seconds <= seconds_of_first_group(best) * ROUNDING
        assert proved.gap >= -1e-9


def test_the_best_split_is_proved_and_a_worse_one_is_not() -> None:
    """Without communication to speak of, the model is the cost model."""
    gpus = {
        "fast": {"dense_tflops": 100, "memory_gb": 80, "network_gb_per_s": 1e6},
        "slow": {"dense_tflops": 30, "memory_gb": 80, "network_gb_per_s": 1e6},
    }
    nodes = [{"name": "a", "gpus": ["fast", "slow", "slow"], "intra_latency_us": 0.001}]
    cluster = Cluster.from_mapping({"nodes": nodes, "gpus": gpus})
    problem = problem_for(cluster, "3b", seq_len=65536, global_batch=1)
    group = Group((0, 1, 2), (40960, 12288, 12288), (20, 6, 6))

    def proved(split: Group) -> float:
        return certify(evaluate(problem, Layout("", (Replica((split,)),), 1)))[0].gap

    assert proved(group) < 2e-3
    assert proved(replace(group, heads=(18, 7, 7))) > 0.05
    assert proved(replace(group, tokens=(30720, 17408, 17408))) > 0.05


def test_groups_of_a_plan_are_proved_in_order() -> None:
    cluster = Cluster.load(EXAMPLES / "8xh100-8xa100.yaml")
    problem = problem_for(cluster, "13b", seq_len=32768)
    found = plan(cluster, "13b", seq_len=32768, strategy="usp")

    certificates = certify(cost_of(found, cluster, problem.model, problem.workload))
    places = [(c.replica, c.group) for c in certificates]
    assert places == [
        (r, g) for r, replica in enumerate(found.replicas) for g in range(len(replica.groups))
    ]
    assert str(certificates[0]).startswith("replica 0, group 0: ")


def test_a_group_that_holds_no_split_has_nothing_to_prove() -> None:
    card = {"dense_tflops": 100, "memory_gb": 12, "network_gb_per_s": 10}
    cluster = Cluster.from_mapping(
        {"nodes": [{"name": "a", "gpus": ["x", "x"]}], "gpus": {"x": card}}
    )
    problem = problem_for(cluster, "7b", seq_len=65536, global_batch=1)
    cost = evaluate(problem, Layout("", (Replica((Group((0, 1), (32768,) * 2, (16, 16)),)),), 1))
    assert not cost.fits

    (certificate,) = certify(cost)
    assert certificate.proved_seconds == certificate.seconds == seconds_of_first_group(cost)
