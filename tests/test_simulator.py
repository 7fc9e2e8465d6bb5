"""The simulator against hand calculation: closed forms, limits, and what must add up."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from drawn_problems import drawn_layout, drawn_problem, problem_for
from invented import CARD, MODEL, cluster_of, cluster_of_nodes, one_each, one_replica
from simulated import RINGS, forward_seconds, slow_links

from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.cost import evaluate
from hexiseq_triton.planner.overlap import Overlap
from hexiseq_triton.planner.plans import ExchangePlan
from hexiseq_triton.planner.problem import Group, Work
from hexiseq_triton.planner.simulator import ENGINES, MODES, Conditions, layer_seconds, simulate
from hexiseq_triton.planner.simulator.graph import KEYS
from hexiseq_triton.planner.simulator.layer import Compiler
from hexiseq_triton.planner.simulator.occupancy import fullest_port_seconds
from hexiseq_triton.planner.simulator.replicas import replica_views

FREE = {"network_gb_per_s": 1e9}
ROW = 2 * 2 * 2 * 16  # bytes of a token's keys and values: both KV heads of MODEL, bf16


# -------------------------------------------------------------------- limits


@pytest.mark.parametrize("engine", ENGINES)
def test_one_gpu_takes_what_the_cost_model_says(engine: str) -> None:
    cost = evaluate(problem_for(cluster_of(1), MODEL, seq_len=1000), one_each(1000))

    found = simulate(cost, engine=engine)  # type: ignore[arg-type]

    memory = 1000e9 * 0.8
    embedding = 8 * (2 * 2 + 2 + 2 * 4) * 64 * 1000 / memory  # which the cost model leaves out
    assert found.step_seconds == pytest.approx(cost.step_seconds + embedding, rel=1e-9)
    assert found.compute_seconds == pytest.approx([found.step_seconds], rel=1e-9)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mode", MODES)
def test_free_links_leave_computing_alone(mode: str, engine: str) -> None:
    cost = evaluate(problem_for(cluster_of(4), MODEL, seq_len=4000), one_each(*[1000] * 4))

    found = forward_seconds(cost, mode, engine)
    assert found == pytest.approx(cost.directions[0][0], rel=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mode", RINGS)
def test_a_ring_without_computing_takes_its_hops(mode: str, engine: str) -> None:
    cost = evaluate(problem_for(slow_links(5), MODEL, seq_len=5000), one_each(*[1000] * 5))

    hop = 1000 * ROW / 0.8e9
    assert forward_seconds(cost, mode, engine) == pytest.approx(4 * hop, rel=1e-3)


@pytest.mark.parametrize("engine", ENGINES)
def test_spread_over_nodes_the_exchange_takes_little_more_than_its_bytes(engine: str) -> None:
    """Two nodes of four: four blocks come through each NIC, and take seven hops round a ring."""

    def seconds(exchange: ExchangePlan) -> float:
        problem = problem_for(slow_links(2, gpus=4), MODEL, exchange, seq_len=8000)
        return forward_seconds(evaluate(problem, one_each(*[1000] * 8)), "direct", engine)

    hop = 1000 * ROW / 0.8e9
    ring = seconds(ExchangePlan(chunk_tokens=250, order="ring"))
    assert ring == pytest.approx(7 * hop, rel=1e-3)
    assert seconds(ExchangePlan(chunk_tokens=250)) <= 1.25 * 4 * hop


@pytest.mark.parametrize("engine", ENGINES)
def test_two_rings_without_computing_take_the_hops_between_nodes_and_one_round_inside(
    engine: str,
) -> None:
    cost = evaluate(
        problem_for(slow_links(3, gpus=4), MODEL, seq_len=12_000), one_each(*[1000] * 12)
    )

    across, inside = 1000 * ROW / 0.8e9, 1000 * ROW / 750e9
    found = forward_seconds(cost, "double_ring", engine)
    assert found == pytest.approx(2 * across + 3 * inside, rel=1e-3)
    assert forward_seconds(cost, "async", engine) == pytest.approx(11 * across, rel=1e-3)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("gb_per_s", [0.05, 0.25, 1.0])
def test_two_rings_hide_the_slow_hop_behind_a_round(engine: str, gb_per_s: float) -> None:
    """Two nodes of four alike: what the cost model says of a layout that exchanges so."""
    nodes = cluster_of_nodes(["card"] * 4, 2, 100, network_gb_per_s=gb_per_s)
    cluster = replace(nodes, overlap=Overlap(0, 0, 0))
    problem = problem_for(cluster, MODEL, seq_len=8000)
    cost = evaluate(problem, replace(one_each(*[1000] * 8), exchange="double_ring"))

    assert forward_seconds(cost, "double_ring", engine) == pytest.approx(
        cost.directions[0][0], rel=1e-3
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_one_window_or_windows_of_one_are_one_ring(engine: str) -> None:
    for nodes, gpus in ((1, 5), (5, 1)):
        cluster = cluster_of(gpus, nodes=nodes, network_gb_per_s=0.1)
        layout = one_each(2000, 500, 500, 500, 1500)
        cost = evaluate(problem_for(cluster, MODEL, seq_len=5000), layout)
        two, one = (layer_seconds(cost, mode=m, engine=engine) for m in ("double_ring", "async"))  # type: ignore[arg-type]
        assert two == pytest.approx(one, rel=1e-9)


@pytest.mark.parametrize("engine", ENGINES)
def test_gathering_without_computing_takes_all_other_blocks(engine: str) -> None:
    cost = evaluate(problem_for(slow_links(5), MODEL, seq_len=5000), one_each(*[1000] * 5))

    found = forward_seconds(cost, "all_gather", engine)
    assert found == pytest.approx(4 * 1000 * ROW / 0.8e9, rel=1e-2)


@pytest.mark.parametrize("engine", ENGINES)
def test_one_group_takes_its_slowest_rank_and_all_to_alls(engine: str) -> None:
    slow = cluster_of_nodes(["card", "half"], network_gb_per_s=1e-2)
    layout = one_replica(Group((0, 1), (700, 300), (1, 3)))
    cost = evaluate(problem_for(slow, MODEL, seq_len=1000), layout)

    assert forward_seconds(cost, "direct", engine) == pytest.approx(cost.directions[0][0], rel=5e-3)


# -------------------------------------------------------------------- speeds 400 : 190


@pytest.mark.parametrize(
    ("mode", "gain"),
    [("lockstep", 1.145), ("async", 1.553), ("streamed", 1.553), ("direct", 1.553)],
)
def test_uneven_shards_gain_less_in_lock_step(mode: str, gain: float) -> None:
    """Half the ranks 400, half 190: in lock-step mean^2 / (min max), else mean / min."""
    cards = {
        name: CARD | FREE | {"dense_tflops": speed}
        for name, speed in (("fast", 400e-3), ("slow", 190e-3))
    }
    content = {"nodes": [{"name": "n", "gpus": {"fast": 4, "slow": 4}}], "gpus": cards}
    model = replace(MODEL, hidden=1, ffn=1, vocab=1)  # attention is all there is to do
    problem = problem_for(Cluster.from_mapping(content), model, seq_len=8 * 2950)

    even = evaluate(problem, one_each(*[2950] * 8))
    uneven = evaluate(problem, one_each(*[4000] * 4, *[1900] * 4))
    measured = forward_seconds(even, mode) / forward_seconds(uneven, mode)
    assert measured == pytest.approx(gain, abs=2e-3)


# -------------------------------------------------------------------- what must add up


@pytest.mark.parametrize("seed", range(12))
def test_bytes_sent_are_received_and_flops_are_all_there(seed: int) -> None:
    rng = Random(seed)
    problem = drawn_problem(rng)
    cost = evaluate(problem, drawn_layout(rng, problem))
    rows, work = cost.rows, problem.work
    linear = work.linear_per_token * rows.tokens.sum()
    attention = (cost.forward.attention * problem.rates.attention_forward[rows.rank]).sum()

    for mode in MODES[:-1]:
        compiler = Compiler(cost, mode, Conditions())
        forward, backward = compiler.forward(), compiler.backward()
        for graph in (forward, backward):
            sent = np.bincount(graph.use_port // problem.cluster.world_size, graph.use_bytes, 4)
            assert sent[0::2].sum() == pytest.approx(sent[1::2].sum(), rel=1e-9)
        assert forward.flops.sum() == pytest.approx(linear + attention, rel=1e-9)
        again = linear + attention
        back = Work.BACKWARD_LINEAR * linear + Work.BACKWARD_ATTENTION * attention
        assert backward.flops.sum() == pytest.approx(again + back, rel=1e-9)


def test_every_mode_moves_the_keys_it_should() -> None:
    problem = problem_for(cluster_of(6), MODEL, seq_len=6000)
    groups = [Group((0, 1), (1500, 500), (3, 1)), Group((2, 3, 4), (900,) * 3, (1, 1, 2))]
    cost = evaluate(problem, one_replica(*groups, Group((5,), (1300,), (4,))))
    one_token = ROW / 2  # of one KV head

    moved = {}
    rings = (*RINGS, "double_ring")
    for mode in ("direct", *rings):
        graph = Compiler(cost, mode, Conditions()).forward()  # type: ignore[arg-type]
        keys = (graph.kind == KEYS) & (graph.peer >= 0)
        each = [
            graph.use_bytes[graph.use_starts[op]]
            if graph.use_starts[op] < graph.use_starts[op + 1]
            else 0.0
            for op in np.flatnonzero(keys)
        ]
        moved[mode] = sum(each) / one_token

    held = np.add.reduceat(cost.rows.kv_heads, cost.rows.group_starts)  # copies count
    tokens = cost.rows.group_tokens
    around = sum(held[g] * (tokens.sum() - tokens[g]) for g in range(3))
    assert [moved[mode] for mode in rings] == pytest.approx([around] * 4)
    view = replica_views(cost)[0]
    assert moved["direct"] == pytest.approx(sum(held * view.fetched.sum(axis=1)))
    assert moved["direct"] < around


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("engine", ENGINES)
def test_a_ranks_time_is_computing_exposed_and_idle(seed: int, engine: str) -> None:
    rng = Random(seed)
    problem = drawn_problem(rng)
    cost = evaluate(problem, drawn_layout(rng, problem))

    for mode in MODES[:-1]:
        found = simulate(cost, mode=mode, engine=engine)  # type: ignore[arg-type]
        for part in found.sections.values():
            parts = np.array([part.computing, part.exposed, part.idle])
            assert parts.min() >= 0  # as it is printed
            assert parts.sum(axis=0) == pytest.approx(
                np.full(problem.cluster.world_size, part.length)
            )
            assert part.seconds >= fullest_port_seconds(part.graph) * (1 - 1e-9)
        assert 0 < found.mfu < 1
        assert found.tokens_per_s == problem.workload.step_tokens / found.step_seconds


@pytest.mark.parametrize("mode", ["direct", *RINGS, "double_ring"])
def test_a_measured_overlap_counts(mode: str) -> None:
    """Attention that exchanges keys was measured to take half as long again."""
    found = []
    for slowdown in (0.0, 0.5):
        cluster = replace(cluster_of(4), overlap=Overlap(0, 0, slowdown))
        cost = evaluate(problem_for(cluster, MODEL, seq_len=4000), one_each(*[1000] * 4))
        found.append(forward_seconds(cost, mode))
    assert found[1] - found[0] == pytest.approx(0.5 * cost.forward.attention[0], rel=1e-5)
