"""The simulator's two engines: they agree, share links fairly, and take little time themselves."""

from __future__ import annotations

from itertools import chain
from time import process_time

import numpy as np
import pytest
from drawn_problems import problem_for
from invented import MODEL, cluster_of, one_replica
from simulated import RINGS, forward_seconds

from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.cost import Cost, evaluate
from hexiseq_triton.planner.partition import deal
from hexiseq_triton.planner.plans import ExchangePlan, Order, Plan, Split
from hexiseq_triton.planner.problem import Group
from hexiseq_triton.planner.schedule import transfers
from hexiseq_triton.planner.simulator import ENGINES, MODES, layer_seconds, simulate
from hexiseq_triton.planner.simulator.fair_sharing import fair_sharing
from hexiseq_triton.planner.simulator.graph import KEYS, Builder
from hexiseq_triton.planner.simulator.links import Uses
from hexiseq_triton.planner.simulator.replicas import replica_views
from hexiseq_triton.planner.simulator.rounds import rounds_of
from hexiseq_triton.segments import CAUSAL, merge


@pytest.mark.parametrize("gb_per_s", [12.5, 25])
@pytest.mark.parametrize("seq_len", [32768, 131072])
@pytest.mark.parametrize("mode", RINGS)
def test_engines_agree_where_no_link_is_shared(mode: str, seq_len: int, gb_per_s: float) -> None:
    """7b, 16 GPUs of two models on slow NICs: a ring's transfers have ports of their own.

    Not so in the asynchronous ring's backward, where keys and gradients leave a rank side by side.
    """
    nodes = [
        {"name": name, "count": 8, "gpus": [gpu]}
        for name, gpu in (("h", "H100-SXM"), ("a", "A100-SXM-80GB"))
    ]
    cluster = Cluster.from_mapping({"inter_gb_per_s": gb_per_s, "nodes": nodes})
    problem = problem_for(cluster, "7b", seq_len=seq_len)
    most, least = seq_len // 16 * 3 // 2, seq_len // 16 // 2
    groups = [Group((r,), (most if r < 8 else least,), (32,)) for r in range(16)]
    cost = evaluate(problem, one_replica(*groups))

    fast, event = (layer_seconds(cost, mode=mode, engine=engine) for engine in ENGINES)  # type: ignore[arg-type]
    assert fast[0] == pytest.approx(event[0], rel=1e-2)
    if mode != "async":
        assert fast[1] == pytest.approx(event[1], rel=1e-2)


@pytest.mark.parametrize("gb_per_s", [12.5, 25])
@pytest.mark.parametrize("seq_len", [32768, 131072])
def test_engines_agree_on_two_rings(seq_len: int, gb_per_s: float) -> None:
    """7b, four nodes of four: inner hops take NVLink, outer ones the NIC.

    In backward keys and gradients leave a rank side by side, as in one asynchronous ring.
    """
    nodes = [
        {"name": name, "count": 2, "gpus": [gpu] * 4}
        for name, gpu in (("h", "H100-SXM"), ("a", "A100-SXM-80GB"))
    ]
    cluster = Cluster.from_mapping({"inter_gb_per_s": gb_per_s, "nodes": nodes})
    groups = [Group((r,), (seq_len // 16,), (32,)) for r in range(16)]
    cost = evaluate(problem_for(cluster, "7b", seq_len=seq_len), one_replica(*groups))

    fast, event = (forward_seconds(cost, "double_ring", engine) for engine in ENGINES)
    assert fast == pytest.approx(event, rel=1e-2)


def test_communication_binds_where_it_should() -> None:
    """At 12.5 GB/s and 32K tokens a ring of 16 computes little; at 128K more."""
    cluster = cluster_of(1, nodes=16, network_gb_per_s=12.5, dense_tflops=400)
    shares = []
    for seq_len in (32768, 131072):
        groups = [Group((r,), (seq_len // 16,), (32,)) for r in range(16)]
        cost = evaluate(problem_for(cluster, "7b", seq_len=seq_len), one_replica(*groups))
        found = simulate(cost, mode="async", engine="event")
        shares.append(float(found.compute_seconds.mean()) / found.step_seconds)
    assert shares[0] < 0.15 < shares[1]


def test_links_are_shared_max_min_fairly() -> None:
    """Ports carry 1 byte/s. a: 0 to 1. b: 0 to 2, whose port takes 0.2. c: 3 to 1."""
    builder = Builder(8)
    a, b, c = (builder.take(1) for _ in range(3))
    ports = {0: (0, 5), 1: (0, 6), 2: (3, 5)}  # senders' ports 0 to 3, receivers' 4 to 7
    for op, flow in ((a, 0), (b, 1), (c, 2)):
        port = np.array(ports[flow])
        seconds = np.where(port == 6, 5.0, 1.0)
        at, num_bytes = np.zeros(2, dtype=np.int64), np.ones(2)
        ends = (np.array([0]), np.array([1]))
        builder.transfer(op, KEYS, ends, np.zeros(1), Uses(at, port, num_bytes, seconds))

    _, stop = fair_sharing(builder.build())
    # a and c halve port 5; then b goes on alone at 0.2, its limit throughout
    assert stop == pytest.approx([2.0, 5.0, 2.0])


@pytest.mark.parametrize("order", ["ring", "spread"])
@pytest.mark.parametrize("window", [1, 2])
def test_direct_transfers_are_the_runtimes(window: int, order: Order) -> None:
    """Rounds, ends and rows as `schedule.transfers` makes them of real segments."""
    exchange = ExchangePlan(chunk_tokens=32, window=window, order=order)
    splits = [Split((200, 120), (3, 1)), Split((256,), (4,)), Split((64, 64, 64), (1, 2, 1))]
    plan = Plan.from_splits(splits, num_kv_heads=2, exchange=exchange)
    tokens = [group.tokens for group in plan.replicas[0].groups]
    segments = [merge(chain.from_iterable(ranks)) for ranks in deal(plan, 0, (sum(tokens),))]
    expected: dict[tuple[int, ...], float] = {}
    for number, together in enumerate(transfers(plan.replicas[0], segments, CAUSAL, exchange), 1):
        for item in together:
            key = (number, item.sender, item.receiver)
            heads = item.kv_heads[1] - item.kv_heads[0]
            expected[key] = expected.get(key, 0.0) + heads * item.num_rows

    problem = problem_for(cluster_of(6), MODEL, exchange, seq_len=sum(tokens), global_batch=1)
    groups = [
        Group(
            tuple(s.rank for s in g.ranks),
            tuple(s.tokens for s in g.ranks),
            tuple(s.num_q_heads for s in g.ranks),
        )
        for g in plan.replicas[0].groups
    ]
    view = replica_views(evaluate(problem, one_replica(*groups, passes=1)))[0]
    rounds = rounds_of(view, exchange, order == "spread")
    found: dict[tuple[int, ...], float] = {}
    row = view.entry_row
    numbers = np.unique(rounds.at, return_inverse=True)[1] + 1  # without rounds that have none
    for at, sender, receiver, carried in zip(
        numbers, rounds.sender, rounds.receiver, rounds.tokens, strict=True
    ):
        key = (int(at), int(view.rank[row[sender]]), int(view.rank[row[receiver]]))
        found[key] = found.get(key, 0.0) + carried * view.entry_heads[receiver]
    assert found == pytest.approx(expected)


def largest() -> Cost:
    """128 GPUs of two models, groups of one: the layout with the most transfers."""
    node = {"name": "n", "count": 16, "gpus": {"H100-SXM": 4, "A100-SXM-80GB": 4}}
    cluster = Cluster.from_mapping({"inter_gb_per_s": 25, "nodes": [node]})
    problem = problem_for(cluster, "7b", seq_len=131072)
    return evaluate(problem, one_replica(*(Group((r,), (1024,), (32,)) for r in range(128))))


@pytest.mark.parametrize(("engine", "seconds"), [("fast", 0.02), ("event", 2.0)])
def test_128_ranks_take_little_time(engine: str, seconds: float) -> None:
    """20 ms and 2 s are the budgets; three times that, since CI's machine may be slow and busy."""
    cost = largest()
    for mode in MODES:
        spent = []
        for _ in range(3 if engine == "fast" else 1):
            before = process_time()
            simulate(cost, mode=mode, engine=engine)  # type: ignore[arg-type]
            spent.append(process_time() - before)
        assert min(spent) < 3 * seconds, mode
