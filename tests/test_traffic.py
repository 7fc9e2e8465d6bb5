"""Bytes through every port against a list of messages, and against the runtime's schedule."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain
from random import Random

import numpy as np
import pytest
from drawn_problems import drawn_layout, drawn_problem, problem_for
from invented import MODEL, cluster_of, one_replica

from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.planner.fetches import Counted
from hexiseq_triton.planner.partition import deal
from hexiseq_triton.planner.plans import ExchangePlan, Plan, Split
from hexiseq_triton.planner.problem import Group, Layout, Problem, Replica
from hexiseq_triton.planner.rates import Floats
from hexiseq_triton.planner.rows import Rows
from hexiseq_triton.planner.schedule import intervals_of, transfers
from hexiseq_triton.planner.sight import sight_of
from hexiseq_triton.planner.traffic import Ports, all_to_all, intervals_held, kv_exchange
from hexiseq_triton.segments import CAUSAL, FULL


@pytest.mark.parametrize("seed", range(10))
def test_all_to_all_ports_carry_every_message(seed: int) -> None:
    rng = Random(seed)
    problem = drawn_problem(rng)
    rows = Rows.of(problem, drawn_layout(rng, problem))
    width = 3.0 * rows.q_heads + 5.0 * rows.kv_heads

    ports = all_to_all(rows, width)

    sent, received = Counter(), Counter()  # type: ignore[var-annotated]
    for d in range(len(rows.rank)):
        for e in range(len(rows.rank)):
            if d != e and rows.group[d] == rows.group[e]:
                near = rows.node[d] == rows.node[e]
                sent[d, near] += rows.tokens[d] * width[e]
                received[e, near] += rows.tokens[d] * width[e]
    for row in range(len(rows.rank)):
        assert ports.out_in_node[row] == pytest.approx(sent[row, True])
        assert ports.out_across[row] == pytest.approx(sent[row, False])
        assert ports.in_in_node[row] == pytest.approx(received[row, True])
        assert ports.in_across[row] == pytest.approx(received[row, False])


@pytest.mark.parametrize("seed", range(20))
def test_what_is_sent_is_received_in_the_node_and_across(seed: int) -> None:
    rng = Random(seed)
    problem = drawn_problem(rng)
    layout = drawn_layout(rng, problem)
    rows = Rows.of(problem, layout)

    fetch = kv_exchange(problem, rows, sight_of(problem, layout, rows).fetches)
    for ports in (fetch, fetch.with_returns(2.0), all_to_all(rows, rows.q_heads)):
        assert ports.out_in_node.sum() == pytest.approx(ports.in_in_node.sum())
        assert ports.out_across.sum() == pytest.approx(ports.in_across.sum())
        for bytes_moved in vars(ports).values():
            assert (bytes_moved >= -1e-6 * max(bytes_moved.max(), 1.0)).all()


# -------------------------------------------------------------------- the runtime's schedule


def drawn_splits(rng: Random) -> list[Split]:
    """Return two to four groups with even tokens and any of 6 heads."""
    splits = []
    for _ in range(rng.randint(2, 4)):
        size = rng.randint(1, 3)
        cuts = sorted(rng.randint(0, 6) for _ in range(size - 1))
        heads = tuple(b - a for a, b in zip([0, *cuts], [*cuts, 6], strict=True))
        splits.append(Split(tuple(2 * rng.randint(1, 20) for _ in range(size)), heads))
    return splits


def scheduled(problem: Problem, plan: Plan, lengths: list[int]) -> tuple[Counter, Counter]:  # type: ignore[type-arg]
    """Return the bytes the runtime receives and sends, by (rank, in the node)."""
    node = problem.rates.node
    received, sent = Counter(), Counter()  # type: ignore[var-annotated]
    for index, replica in enumerate(plan.replicas):
        segments = [
            [segment for run in runs for segment in run] for runs in deal(plan, index, lengths)
        ]
        mask = CAUSAL if problem.workload.causal else FULL
        whole = ExchangePlan(chunk_tokens=1 << 40)
        for item in chain(*transfers(replica, segments, mask, whole)):
            num_bytes = item.num_rows * (item.kv_heads[1] - item.kv_heads[0]) * 2 * 2 * 16
            near = node[item.sender] == node[item.receiver]
            received[item.receiver, near] += num_bytes
            sent[item.sender, near] += num_bytes
    return received, sent


def problem_and_layout(plan: Plan, rng: Random, **workload: object) -> tuple[Problem, Layout]:
    """Return what the planner sees of a plan, on nodes of one to three GPUs."""
    model = replace(MODEL, heads=6, kv_heads=plan.num_kv_heads, head_dim=16)
    cluster = cluster_of(rng.randint(1, 3), nodes=plan.world_size)
    problem = problem_for(cluster, model, seq_len=plan.seq_len, **workload)  # type: ignore[arg-type]
    replicas = [
        Replica(
            tuple(
                Group(
                    tuple(share.rank for share in group.ranks),
                    tuple(share.tokens for share in group.ranks),
                    tuple(share.num_q_heads for share in group.ranks),
                )
                for group in replica.groups
            ),
            replica.sequences,
        )
        for replica in plan.replicas
    ]
    return problem, Layout("", tuple(replicas), 1, plan.exchange.arrangement)


def predicted(problem: Problem, layout: Layout) -> tuple[Rows, Ports]:
    rows = Rows.of(problem, layout)
    return rows, kv_exchange(problem, rows, sight_of(problem, layout, rows).fetches)


@pytest.mark.parametrize("arrangement", ["balanced", "contiguous"])
@pytest.mark.parametrize("draw", range(15))
def test_one_document_moves_exactly_the_runtimes_bytes(draw: int, arrangement: str) -> None:
    rng = Random(draw)
    exchange = ExchangePlan(arrangement)  # type: ignore[arg-type]
    splits = drawn_splits(rng)
    plan = Plan.from_splits(splits, num_kv_heads=rng.choice([2, 3, 6]), exchange=exchange)
    problem, layout = problem_and_layout(plan, rng)

    rows, ports = predicted(problem, layout)
    received, sent = scheduled(problem, plan, [plan.seq_len])
    alike = _same_bytes(rows, ports.in_in_node, ports.in_across, received)
    # ranks of a group that hold the same KV head share requests here, and take turns there
    if rows.kv_heads.sum() == plan.num_kv_heads * len(rows.group_sizes):
        assert alike == "in the node and across"
        assert _same_bytes(rows, ports.out_in_node, ports.out_across, sent) == alike
    assert alike


@pytest.mark.parametrize("draw", range(10))
def test_named_documents_move_exactly_the_runtimes_bytes(draw: int) -> None:
    rng = Random(draw)
    plan = Plan.from_splits(drawn_splits(rng), num_kv_heads=rng.choice([2, 3, 6]))
    lengths = []
    while sum(lengths) < plan.seq_len:
        lengths.append(min(rng.randint(1, 90), plan.seq_len - sum(lengths)))
    problem, layout = problem_and_layout(plan, rng, documents=tuple(lengths))

    rows, ports = predicted(problem, layout)
    received, _ = scheduled(problem, plan, lengths)
    assert _same_bytes(rows, ports.in_in_node, ports.in_across, received)


def _same_bytes(rows: Rows, near: Floats, far: Floats, scheduled: Counter) -> str:  # type: ignore[type-arg]
    """Say where a port's bytes are those of the schedule: nowhere (""), in all, or by route."""
    expected = np.array([[scheduled[rank, True], scheduled[rank, False]] for rank in rows.rank])
    if np.allclose(np.stack([near, far], axis=1), expected, rtol=1e-9):
        return "in the node and across"
    return "together" if np.allclose(near + far, expected.sum(axis=1), rtol=1e-9) else ""


@pytest.mark.parametrize("draw", range(10))
def test_packed_sequences_move_no_more_than_predicted_and_most_of_it(draw: int) -> None:
    rng = Random(draw)
    splits = [replace(s, tokens=tuple(200 * t for t in s.tokens)) for s in drawn_splits(rng)]
    plan = Plan.from_splits(splits, num_kv_heads=rng.choice([2, 3, 6]), sequences=[2])
    problem, layout = problem_and_layout(plan, rng, global_batch=2)

    rows, ports = predicted(problem, layout)
    received, _ = scheduled(problem, plan, [plan.seq_len] * 2)
    bytes_in = ports.in_across + ports.in_in_node
    for row, rank in enumerate(rows.rank):
        assert bytes_in[row] >= (received[rank, True] + received[rank, False]) * (1 - 1e-12)
    assert sum(received.values()) > 0.6 * bytes_in.sum()


@pytest.mark.parametrize("draw", range(10))
def test_intervals_are_those_of_the_runtime(draw: int) -> None:
    rng = Random(draw)
    plan = Plan.from_splits(drawn_splits(rng), num_kv_heads=rng.choice([2, 3, 6]), world_size=12)
    problem, layout = problem_and_layout(plan, rng)
    rows = Rows.of(problem, layout)

    first = plan.replicas[0].shares[0].rank
    runtime = BatchLayout(plan, first, [plan.seq_len])
    expected = [len(runtime.intervals(share)) for share in plan.replicas[0].shares]
    assert intervals_held(rows).tolist() == expected
    assert expected == [
        len(intervals_of(share, runtime._intervals)) for share in plan.replicas[0].shares
    ]


@pytest.mark.parametrize("seed", range(10))
def test_the_nested_pattern_is_the_matrix_it_stands_for(seed: int) -> None:
    rng = Random(seed)
    problem = drawn_problem(rng)
    layout = drawn_layout(rng, problem)
    nested = sight_of(problem, layout, Rows.of(problem, layout)).fetches
    count = len(layout.groups)
    receiver, sender = np.indices((count, count)).reshape(2, -1)
    counted = Counted(nested.between(receiver, sender).reshape(count, count))

    holders = np.array([[rng.randint(0, 3) for _ in range(4)] for _ in range(count)], dtype=float)
    assert nested.received().tolist() == pytest.approx(counted.received().tolist())
    assert np.allclose(nested.asked(holders), counted.asked(holders))
    for ours, expected in zip(nested.chunks(100), counted.chunks(100), strict=True):
        assert ours.tolist() == expected.tolist()


def test_rows_read_the_kv_heads_of_their_query_heads() -> None:
    problem = problem_for(cluster_of(4), replace(MODEL, heads=6, kv_heads=2), seq_len=8)
    rows = Rows.of(problem, one_replica(Group((2, 0, 3, 1), (2, 2, 2, 2), (2, 0, 3, 1))))

    assert rows.kv_ranges.tolist() == [[0, 1], [0, 0], [0, 2], [1, 2]]
    assert np.array_equal(rows.rank, [2, 0, 3, 1])
