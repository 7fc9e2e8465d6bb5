"""Attention under any plan equals dense attention, in float64, on real processes."""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from drawn_plans import Case, cases
from equality import largest_errors
from hypothesis import HealthCheck, given, seed, settings
from pool import Pool

from hexiseq_triton.layout import BatchLayout, Round
from hexiseq_triton.planner import ExchangePlan, Plan, Split
from hexiseq_triton.ring import Ring
from hexiseq_triton.segments import Mask

TOLERANCE = 1e-10
SEED = int(os.environ.get("HEXISEQ_TEST_SEED", random.SystemRandom().randrange(2**32)))


def errors_of(pool: Pool, case: Case) -> dict[str, float]:
    found = pool.run(
        largest_errors, case.plan, case.lengths, case.head_dim, case.options, case.seed
    )
    return {name: max(f.get(name, 0.0) for f in found) for name in ("o", "dq", "dk", "dv")}


def test_every_drawn_plan_equals_dense_attention(pool: Pool) -> None:
    print(f"HEXISEQ_TEST_SEED={SEED}")
    drawn: Counter[str] = Counter()

    def check(case: Case) -> None:
        drawn["plans"] += 1
        drawn["groups of different size"] += len(set(case.group_sizes)) > 1
        drawn["cut KV groups"] += case.cuts_a_kv_group
        drawn["a rank without tokens"] += any(s.tokens == 0 for s in case.plan.shares)
        errors = errors_of(pool, case)
        assert max(errors.values()) <= TOLERANCE, f"HEXISEQ_TEST_SEED={SEED}: {errors}"

    for mixed, count in ((False, 140), (True, 80)):
        settings(
            max_examples=count,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )(seed(SEED)(given(cases(mixed))(check)))()
    print(dict(drawn))
    assert drawn["plans"] >= 200
    for kind in ("groups of different size", "cut KV groups", "a rank without tokens"):
        assert drawn[kind] >= 40, kind


FIXED = {
    "{3,1,1} with cuts inside KV groups": Case(
        Plan.from_splits(
            [Split((90, 41, 30), (5, 4, 5)), Split((101,), (14,)), Split((53,), (14,))],
            num_kv_heads=2,
        ),
        ((7, 0, 131, 1, 2, 113, 61),),
        8,
        {"causal": True},
        1,
    ),
    "KV heads on 3 ranks and on 1": Case(
        Plan.from_splits(
            [Split((50, 60, 70, 91), (2, 2, 3, 7)), Split((30,), (14,))], num_kv_heads=2
        ),
        ((301,),),
        8,
        {"causal": True},
        2,
    ),
    "two replicas, 2 + 1 ranks, 3:1 sequences": Case(
        Plan.from_splits(
            [Split((190,), (6,)), Split((110,), (6,))],
            [Split((100,), (6,))],
            num_kv_heads=2,
            sequences=(3, 1),
            world_size=5,
        ),
        ((100, 100, 100), (40, 0, 60)),
        4,
        {"causal": True},
        3,
    ),
    "two replicas with groups of two": Case(
        Plan.from_splits(
            [Split((40, 21), (2, 4)), Split((29,), (6,))],
            [Split((15, 15), (5, 1))],
            num_kv_heads=2,
            sequences=(3, 1),
        ),
        ((89,), (31,)),
        4,
        {"causal": True, "window_size": (11, 0)},
        4,
    ),
    "MQA on more ranks than heads": Case(
        Plan.from_splits([Split((20, 20, 20, 20, 20), (1, 0, 1, 0, 1))], num_kv_heads=1),
        ((97, 3),),
        4,
        {"causal": False},
        5,
    ),
}


@pytest.mark.parametrize("name", FIXED)
def test_chosen_plan_equals_dense_attention(pool: Pool, name: str) -> None:
    errors = errors_of(pool, FIXED[name])
    assert max(errors.values()) <= TOLERANCE, errors


# -------------------------------------------------------------------- the oracle sees faults


def with_two_routes_swapped(*args: Any) -> dict[str, float]:
    """Worker: each rank takes the first two routes that arrive for each other."""
    original = BatchLayout.rounds

    def swapped(self: BatchLayout, mask: Mask) -> tuple[Round, ...]:
        rounds = list(original(self, mask))
        at = [i for i, step in enumerate(rounds) if step.arrival][:2]
        if len(at) == 2:
            i, j = at
            a, b = rounds[i].arrival_segments, rounds[j].arrival_segments
            rounds[i] = Round(rounds[i].departure, rounds[i].arrival, b)
            rounds[j] = Round(rounds[j].departure, rounds[j].arrival, a)
        return tuple(rounds)

    with mock.patch.object(BatchLayout, "rounds", swapped):
        return largest_errors(*args)


def with_one_partial_dropped(*args: Any) -> dict[str, float]:
    """Worker: each rank forgets the first partial dK/dV that comes back to it."""
    original = Ring._add_returned
    dropped = []

    def forgetful(self: Ring, dkv: Any, step: Round, returned: Any, pending: Any) -> None:
        if step.departure and not dropped:
            dropped.append(step)
            pending.wait()
            return
        original(self, dkv, step, returned, pending)

    with mock.patch.object(Ring, "_add_returned", forgetful):
        return largest_errors(*args)


MUTATED = Case(
    Plan.from_splits(
        [Split((64, 32), (3, 3)), Split((96,), (6,)), Split((64,), (6,))],
        num_kv_heads=2,
        world_size=5,
        exchange=ExchangePlan(chunk_tokens=32),
    ),
    ((64, 1, 90, 101),),
    4,
    {"causal": True},
    0,
)


@pytest.mark.parametrize(
    ("mutation", "wrong"),
    [(with_two_routes_swapped, "o"), (with_one_partial_dropped, "dk")],
)
def test_the_oracle_notices_a_fault(pool: Pool, mutation: Any, wrong: str) -> None:
    case = MUTATED
    found = pool.run(mutation, case.plan, case.lengths, case.head_dim, case.options, case.seed)
    assert max(errors.get(wrong, 0.0) for errors in found) > 1e-3
    assert max(errors_of(pool, case).values()) <= TOLERANCE


def test_deterministic_fill_reaches_new_empty() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.zeros(1).new_empty(4).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)
