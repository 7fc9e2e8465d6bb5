"""Conditions of a simulated step: jitter, stragglers, a shared uplink, copies by engines."""

from __future__ import annotations

import pytest
from drawn_problems import problem_for
from invented import MODEL, cluster_of, one_each, one_replica
from simulated import slow_links

from hexiseq_triton.planner.cost import evaluate
from hexiseq_triton.planner.problem import Group
from hexiseq_triton.planner.simulator import Conditions, simulate


def uneven_pair(**conditions: object) -> float:
    cost = evaluate(problem_for(cluster_of(2), MODEL, seq_len=2000), one_each(1000, 1000))
    return simulate(cost, conditions=Conditions(**conditions)).step_seconds  # type: ignore[arg-type]


def test_the_same_seed_gives_the_same_step_and_another_one_another() -> None:
    assert uneven_pair(jitter=0.1, seed=1) == uneven_pair(jitter=0.1, seed=1)
    assert uneven_pair(jitter=0.1, seed=1) != uneven_pair(jitter=0.1, seed=2)
    assert uneven_pair() == uneven_pair()


def test_jitter_makes_ranks_wait_for_the_unluckiest() -> None:
    assert uneven_pair(jitter=0.1, seed=3) > uneven_pair()


def test_a_straggler_paces_the_step() -> None:
    assert uneven_pair(stragglers={1: 1.5}) == pytest.approx(1.5 * uneven_pair(), rel=1e-3)


def test_an_oversubscribed_uplink_slows_what_leaves_the_node() -> None:
    groups = [Group((r,), (1000,), (4,)) for r in (0, 2, 1, 3)]  # every hop leaves its node
    cost = evaluate(problem_for(slow_links(2, gpus=2), MODEL, seq_len=4000), one_replica(*groups))

    seconds = [
        simulate(
            cost, mode="lockstep", engine="event", conditions=Conditions(oversubscription=times)
        ).layer_seconds[0]
        for times in (1.0, 3.0)
    ]
    assert seconds[1] == pytest.approx(3 * seconds[0], rel=1e-2)


def test_copy_engines_leave_computing_at_full_speed() -> None:
    cluster = cluster_of(4, network_gb_per_s=1.0, dense_tflops=1000)
    cost = evaluate(problem_for(cluster, MODEL, seq_len=40_000), one_each(*[10_000] * 4))
    with_kernels, with_engines = (
        simulate(cost, mode="async", conditions=Conditions(copy_engine=on)) for on in (False, True)
    )
    assert with_engines.compute_seconds.sum() < 0.999 * with_kernels.compute_seconds.sum()
