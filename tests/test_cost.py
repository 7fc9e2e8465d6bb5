"""The cost and memory model against hand calculation, and against the runtime's own schedule."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from drawn_problems import drawn_layout, drawn_problem, problem_for

from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.cost import evaluate
from hexiseq_triton.planner.memory import group_token_caps, memory_model, token_caps
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.partition import deal
from hexiseq_triton.planner.plans import ExchangePlan, Plan, Split
from hexiseq_triton.planner.problem import Group, Layout, Problem
from hexiseq_triton.planner.schedule import transfers
from hexiseq_triton.planner.traffic import Rows, all_to_all, fetched_tokens, kv_exchange
from hexiseq_triton.segments import CAUSAL

MODEL = ModelSpec(layers=1, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=100)
CARD = {
    "dense_tflops": 1,
    "memory_gb": 10,
    "network_gb_per_s": 1e9,  # as good as free
    "efficiency": {"gemm": 1, "attention_forward": 0.5, "attention_backward": 0.25},
}


def cluster_of(count: int, nodes: int = 1, **card: float) -> Cluster:
    """Return `nodes` nodes of `count` equal GPUs, at 1 TFLOP/s and free links unless told."""
    node = {"name": "n", "gpus": ["card"] * count, "count": nodes}
    latency = {"intra_latency_us": 1e-9, "inter_latency_us": 1e-9}
    return Cluster.from_mapping({"nodes": [node | latency], "gpus": {"card": CARD | card}})


def one_each(*tokens: int, arrangement: str = "balanced") -> Layout:
    groups = tuple(Group((rank,), (count,), (4,)) for rank, count in enumerate(tokens))
    return Layout("ones", groups, arrangement)  # type: ignore[arg-type]


def test_one_gpu_pays_for_linear_attention_and_logits() -> None:
    problem = problem_for(cluster_of(1), MODEL, seq_len=1000, global_batch=3)

    cost = evaluate(problem, one_each(1000))

    linear = 2 * MODEL.layer_matrix_parameters * 1000 / 1e12
    pairs = 1000 * 1001 / 2
    forward = linear + 4 * 16 * 4 * pairs / 0.5e12
    backward = 2 * linear + 2.5 * 4 * 16 * 4 * pairs / 0.25e12
    logits = 3 * 2 * 64 * 100 * 1000 / 1e12
    optimizer = 28 * MODEL.parameters / (1000e9 * 0.8)
    expected = 3 * (forward + forward + backward + logits) + optimizer  # recomputed once
    assert cost.step_seconds == pytest.approx(expected, rel=1e-12)
    assert cost.busy_seconds[0] == pytest.approx(expected, rel=1e-12)


def test_without_recompute_forward_runs_once() -> None:
    problem = problem_for(cluster_of(1), MODEL, seq_len=1000)
    kept = replace(problem, workload=replace(problem.workload, recompute="none"))
    layer = evaluate(problem, one_each(1000)).group_seconds
    kept_layer = evaluate(kept, one_each(1000)).group_seconds

    linear = 2 * MODEL.layer_matrix_parameters * 1000 / 1e12
    attention = 4 * 16 * 4 * 1000 * 1001 / 2 / 0.5e12
    assert (layer - kept_layer)[0] == pytest.approx(linear + attention)


def test_balanced_causal_halves_work_and_contiguous_charges_the_last_rank() -> None:
    problem = problem_for(cluster_of(4), MODEL, seq_len=4000)
    balanced = evaluate(problem, one_each(1000, 1000, 1000, 1000))
    contiguous = evaluate(problem, one_each(*[1000] * 4, arrangement="contiguous"))

    per_pair = 4 * 16 * 4 * (2 / 0.5e12 + 2.5 / 0.25e12)
    linear = 4 * 2 * MODEL.layer_matrix_parameters * 1000 / 1e12
    last = 4000 * 4001 / 2 - 3000 * 3001 / 2
    expected = [linear + per_pair * pairs for pairs in (1000 * 4001 / 2, last)]
    measured = [balanced.group_seconds.max(), contiguous.group_seconds[3]]
    assert measured == pytest.approx(expected, rel=1e-6)


def test_all_to_all_counts_every_port_of_an_uneven_group() -> None:
    problem = problem_for(cluster_of(2, nodes=2), MODEL, seq_len=1000)
    layout = Layout("", (Group((0, 1, 2), (500, 300, 200), (1, 1, 2)),))
    rows = Rows.of(problem, layout)

    ports = all_to_all(problem, rows, rows.q_heads)

    head = 2 * 16  # bytes of one token's head; rank 2 stands in the other node
    assert ports.out_in_node.tolist() == [500 * 1 * head, 300 * 1 * head, 0]
    assert ports.in_in_node.tolist() == [300 * 1 * head, 500 * 1 * head, 0]
    assert ports.out_across.tolist() == [500 * 2 * head, 300 * 2 * head, 200 * 2 * head]
    assert ports.in_across.tolist() == [200 * 1 * head, 200 * 1 * head, 800 * 2 * head]


def test_slow_ports_are_paid_twice_a_pass_by_groups_and_never_by_single_ranks() -> None:
    fast = problem_for(cluster_of(2), MODEL, seq_len=1000)
    slow = problem_for(cluster_of(2, network_gb_per_s=0.001), MODEL, seq_len=1000)
    pair = Layout("", (Group((0, 1), (500, 500), (2, 2)),))
    lone = Layout("", (Group((0,), (1000,), (4,)),))

    extra = evaluate(slow, pair).group_seconds - evaluate(fast, pair).group_seconds
    num_bytes = 500 * (2 + 2 * 1) * 32 + 500 * 2 * 32  # q, k and v in, o out
    # forward, recomputed forward, backward
    assert extra[0] == pytest.approx(3 * num_bytes / (0.75e-3 * 1e9), rel=1e-5)
    assert evaluate(slow, lone).group_seconds[0] == evaluate(fast, lone).group_seconds[0]


def drawn_splits(rng: Random) -> list[Split]:
    splits = []
    for _ in range(rng.randint(2, 4)):
        size = rng.randint(1, 3)
        cuts = sorted(rng.randint(0, 6) for _ in range(size - 1))
        heads = tuple(b - a for a, b in zip([0, *cuts], [*cuts, 6], strict=True))
        tokens = [2 * rng.randint(1, 20) for _ in range(size)]
        splits.append(Split(tuple(tokens), heads))
    return splits


@pytest.mark.parametrize("draw", range(30))
def test_exchange_moves_the_rows_of_the_runtimes_schedule(draw: int) -> None:
    rng = Random(draw)
    splits = drawn_splits(rng)
    plan = Plan.from_splits(splits, num_kv_heads=rng.choice([2, 3, 6]))
    model = replace(MODEL, heads=6, kv_heads=plan.num_kv_heads, head_dim=16)
    problem = problem_for(cluster_of(1, nodes=plan.world_size), model, seq_len=plan.seq_len)
    groups = [
        Group(tuple(s.rank for s in group.ranks), split.tokens, split.heads)
        for group, split in zip(plan.replicas[0].groups, splits, strict=True)
    ]
    layout = Layout("", tuple(groups))
    rows = Rows.of(problem, layout)

    ports = kv_exchange(problem, rows, fetched_tokens(problem, layout, rows))

    received: dict[int, int] = defaultdict(int)
    segments = [
        [segment for run in runs for segment in run] for runs in deal(plan, 0, [plan.seq_len])
    ]
    for item in transfers(plan.replicas[0], segments, CAUSAL, 1 << 40):
        heads = item.kv_heads[1] - item.kv_heads[0]
        received[item.receiver] += item.num_rows * heads * 2 * 2 * 16
    assert ports.in_across.tolist() == pytest.approx([received[rank] for rank in rows.rank])
    assert ports.in_across.sum() == pytest.approx(ports.out_across.sum())


def test_attention_hides_the_exchange_or_waits_for_it() -> None:
    layout = one_each(2000, 2000)
    links = (1e9, 1.0, 0.001)
    seconds = []
    for network_gb_per_s in links:
        cluster = cluster_of(2, network_gb_per_s=network_gb_per_s)
        problem = problem_for(cluster, MODEL, ExchangePlan(chunk_tokens=100), seq_len=4000)
        seconds.append(evaluate(problem, layout).group_seconds[0])

    assert seconds[1] == pytest.approx(seconds[0], rel=1e-3)  # hidden
    rows = 2000 * 2 * 2 * 2 * 16  # what the outer rank fetches: tokens, k and v, heads, bytes
    # thrice fetched, and each of backward's fetches answered in float32 by what it sent: half
    least = (2 * rows + max(rows + 2 * rows / 2, rows / 2 + 2 * rows)) / 0.75e6
    assert least < seconds[2] < 1.1 * least


def test_states_are_sharded_evenly_and_limits_are_95_percent() -> None:
    model = ModelSpec.load("7b")
    two, four = (problem_for(cluster_of(n), model, seq_len=64) for n in (2, 4))

    saved = memory_model(two).fixed - memory_model(four).fixed
    assert saved == pytest.approx(16 * model.parameters * (1 / 2 - 1 / 4))
    assert two.rates.memory_limit.tolist() == [9.5e9, 9.5e9]


def test_keeping_activations_costs_memory_in_every_layer() -> None:
    problem = problem_for(cluster_of(1), "7b", seq_len=4096)
    kept = replace(problem, workload=replace(problem.workload, recompute="none"))

    assert memory_model(kept).per_token > 5 * memory_model(problem).per_token
    assert memory_model(kept).per_q_head > 5 * memory_model(problem).per_q_head


@pytest.mark.parametrize("draw", range(20))
def test_memory_caps_are_what_just_fits(draw: int) -> None:
    problem = drawn_problem(Random(draw))
    layout = drawn_layout(Random(draw), problem)
    rows, memory = Rows.of(problem, layout), memory_model(problem)
    limit = problem.rates.memory_limit[rows.rank]

    caps = token_caps(problem, memory, rows)
    for step, fits in ((0, True), (1, False)):
        used = memory.rank_bytes(replace(rows, tokens=caps + step))
        assert ((used <= limit) == fits).all()

    group_caps = group_token_caps(problem, memory, rows)
    room = token_caps(problem, memory, replace(rows, group_tokens=group_caps))
    slack = rows.group_sizes  # each rank's room is rounded down to a token
    assert (room >= 0).all()
    assert (np.add.reduceat(room, rows.group_starts) + slack >= group_caps).all()


def test_twice_the_tokens_cost_more_seconds_and_no_less_memory() -> None:
    rng = Random(7)
    for _ in range(30):
        problem = drawn_problem(rng)
        layout = drawn_layout(rng, problem)
        before = evaluate(problem, layout)
        longer = _longer(problem)
        doubled = Layout(
            "",
            tuple(
                Group(g.ranks, tuple(2 * count for count in g.tokens), g.heads)
                for g in layout.groups
            ),
        )
        after = evaluate(longer, doubled)

        assert after.step_seconds > before.step_seconds
        assert (after.memory_bytes >= before.memory_bytes).all()


def _longer(problem: Problem) -> Problem:
    workload = problem.workload
    return replace(problem, workload=replace(workload, seq_len=2 * workload.seq_len))
