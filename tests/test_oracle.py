"""Attention under any plan equals dense attention, in float64, on real processes."""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import replace
from itertools import combinations
from typing import Any
from unittest import mock

import pytest
import torch
from drawn_plans import Case, cases
from equality import NAMES_WITH_SINK, largest_errors, planned, random_qkv, random_sink
from hypothesis import HealthCheck, given, seed, settings
from pool import TIMEOUT, Pool

from hexiseq_triton.attention import hexiseq_attention
from hexiseq_triton.context import init
from hexiseq_triton.errors import HexiSeqError
from hexiseq_triton.exchange import Returns
from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.module import HexiSeqAttention
from hexiseq_triton.planner import ExchangePlan, Plan, Split
from hexiseq_triton.rounds import PlacedRound, Round
from hexiseq_triton.segments import Mask

TOLERANCE = 1e-10
SEED = int(os.environ.get("HEXISEQ_TEST_SEED", random.SystemRandom().randrange(2**32)))


def errors_of(pool: Pool, case: Case) -> dict[str, float]:
    found = pool.run(
        largest_errors, case.plan, case.lengths, case.head_dim, case.options, case.seed
    )
    return {name: max(f.get(name, 0.0) for f in found) for name in NAMES_WITH_SINK}


def test_every_drawn_plan_equals_dense_attention(pool: Pool) -> None:
    print(f"HEXISEQ_TEST_SEED={SEED}")
    drawn: Counter[str] = Counter()

    def check(case: Case) -> None:
        drawn["plans"] += 1
        drawn["groups of different size"] += len(set(case.group_sizes)) > 1
        drawn["cut KV groups"] += case.cuts_a_kv_group
        drawn["a rank without tokens"] += any(s.tokens == 0 for s in case.plan.shares)
        drawn["a sink"] += "sink" in case.options
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
    for kind in ("groups of different size", "cut KV groups", "a rank without tokens", "a sink"):
        assert drawn[kind] >= (30 if kind == "a sink" else 40), kind


FIXED = {
    "{3,1,1} with cuts inside KV groups": Case(
        Plan.from_splits(
            [Split((90, 41, 30), (5, 4, 5)), Split((101,), (14,)), Split((53,), (14,))],
            num_kv_heads=2,
        ),
        ((7, 0, 131, 1, 2, 113, 61),),
        8,
        {"causal": True, "sink": True},
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
        {"causal": True, "window_size": (11, 0), "sink": True},
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


@pytest.mark.parametrize("window", [1, 2, 3])
def test_chunks_that_share_a_launch_change_nothing(pool: Pool, window: int) -> None:
    exchange = ExchangePlan(chunk_tokens=9, window=window)
    case = replace(MUTATED, plan=replace(MUTATED.plan, exchange=exchange))
    assert max(errors_of(pool, case).values()) <= TOLERANCE


def test_partials_may_travel_in_a_lower_precision(pool: Pool) -> None:
    case = replace(MUTATED, options={"causal": True, "reduce_dtype": torch.float32})
    errors = errors_of(pool, case)
    assert max(errors["o"], errors["dq"]) <= TOLERANCE
    for name in ("dk", "dv"):
        assert TOLERANCE < errors[name] < 1e-5


def under_autocast(rank: int, plan: Plan) -> None:
    """Worker: autocast, forward and backward, changes no bit of attention in float32."""
    torch.use_deterministic_algorithms(True)
    with init(plan, device="cpu", timeout=TIMEOUT) as context:
        tensors = random_qkv(plan, 255, 4, seed=0, dtype=torch.float32)
        expected = planned(context, tensors, [255], causal=True)
        with torch.autocast("cpu", torch.bfloat16):
            found = planned(context, tensors, [255], causal=True)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)


def test_autocast_takes_no_precision_from_float32(pool: Pool) -> None:
    pool.run(under_autocast, MUTATED.plan)


def module_beside_function(rank: int, plan: Plan) -> None:
    """Worker: the module gives what the function does, and learns nothing but its sink."""
    with init(plan, timeout=TIMEOUT) as context:
        tensors = random_qkv(plan, 255, 4, seed=0)
        batch = context.shard(tensors, cu_seqlens=torch.tensor([0, 255]))
        module = HexiSeqAttention(context, causal=True, learnable_sink=True)
        assert [name for name, _ in module.named_parameters()] == ["sink"]
        assert not list(HexiSeqAttention(context).parameters())
        with torch.no_grad():
            module.sink.copy_(random_sink(plan, seed=1))
        sink = module.sink.detach().requires_grad_()
        q, k, v = (batch[name] for name in "qkv")
        found = module(q, k, v, batch.layout)
        expected = hexiseq_attention(
            q, k, v, context, batch.layout, causal=True, learnable_sink=sink
        )
        assert torch.equal(found, expected)
        dsink = [
            torch.autograd.grad(o.sum(), s)[0] for o, s in ((found, module.sink), (expected, sink))
        ]
        assert torch.equal(*dsink)
        held = [share.q_heads for share in plan.shares if share.rank == rank]
        others = torch.ones(plan.num_heads, dtype=torch.bool)
        for heads in held:
            others[slice(*heads)] = False
        assert (dsink[0][others] == 0).all()
        assert (dsink[0][~others] != 0).all()


def test_the_module_learns_its_sink(pool: Pool) -> None:
    pool.run(module_beside_function, MUTATED.plan)


def arguments_that_do_not_fit(rank: int, plan: Plan) -> str:
    """Worker: return what the call says."""
    with init(plan, timeout=TIMEOUT) as context:
        batch = context.shard(random_qkv(plan, 255, 4, seed=0), cu_seqlens=torch.tensor([0, 255]))
        q, k, v = (batch[name] for name in "qkv")
        with pytest.raises(HexiSeqError) as raised:  # maybe what an idle rank says of it
            hexiseq_attention(q, k, v, context, batch.layout, learnable_sink=torch.ones(5))
        return str(raised.value)


def test_a_sink_of_another_size_raises_on_every_rank(pool: Pool) -> None:
    for message in pool.run(arguments_that_do_not_fit, MUTATED.plan):
        assert "learnable_sink has shape (5,)" in message


# -------------------------------------------------------------------- the oracle sees faults


def with_two_routes_swapped(*args: Any) -> dict[str, float]:
    """Worker: each rank takes two arriving transfers of the same size for each other."""
    original = BatchLayout.rounds

    def swapped(self: BatchLayout, mask: Mask) -> tuple[Round, ...]:
        rounds = list(original(self, mask))
        at = [(i, j) for i, step in enumerate(rounds) for j in range(len(step.arrivals))]
        for pair in combinations(at, 2):
            a, b = (rounds[i].arrivals[j] for i, j in pair)
            if a.item.kv_heads == b.item.kv_heads and a.item.num_rows == b.item.num_rows:
                for (i, j), segments in zip(pair, (b.segments, a.segments), strict=True):
                    arrivals = list(rounds[i].arrivals)
                    arrivals[j] = arrivals[j]._replace(segments=segments)
                    rounds[i] = rounds[i]._replace(arrivals=tuple(arrivals))
                break
        return tuple(rounds)

    with mock.patch.object(BatchLayout, "rounds", swapped):
        return largest_errors(*args)


def with_one_partial_dropped(*args: Any) -> dict[str, float]:
    """Worker: each rank forgets the first partial dK/dV that comes back to it."""
    original = Returns.wait
    dropped = []

    def forgetful(self: Returns) -> PlacedRound:
        round_ = original(self)
        if round_.returns and not dropped:
            dropped.append(round_)
            round_ = replace(round_, returns={})
        return round_

    with mock.patch.object(Returns, "wait", forgetful):
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
