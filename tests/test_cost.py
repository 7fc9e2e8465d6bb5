"""The cost model against hand calculation: closed forms, limits, and what must add up."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from drawn_problems import drawn_layout, drawn_problem, problem_for
from invented import CARD, MODEL, cluster_of, cluster_of_nodes, one_each, one_replica

from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.cost import evaluate
from hexiseq_triton.planner.fsdp import boundary_seconds, fsdp_seconds
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.partition import deal
from hexiseq_triton.planner.plans import ExchangePlan, Plan, Split
from hexiseq_triton.planner.problem import Group, Layout, Problem, Replica
from hexiseq_triton.planner.rates import COMPUTE_SLOWDOWN, TRANSFER_SLOWDOWN, together
from hexiseq_triton.planner.terms import terms_of
from hexiseq_triton.segments import CAUSAL, visible_pairs, whole_documents

LINEAR = 2 * MODEL.layer_matrix_parameters / 1e12  # seconds a token, forward
PAIR_FORWARD, PAIR_BACKWARD = 4 * 16 / 0.5e12, 2.5 * 4 * 16 / 0.25e12  # seconds a pair and head


def test_one_gpu_pays_for_linear_attention_logits_and_optimizer() -> None:
    problem = problem_for(cluster_of(1), MODEL, seq_len=1000, global_batch=3)

    cost = evaluate(problem, one_each(1000, passes=3))

    pairs = 4 * 1000 * 1001 / 2
    forward = 1000 * LINEAR + pairs * PAIR_FORWARD
    backward = 2 * 1000 * LINEAR + pairs * PAIR_BACKWARD
    logits = 3 * 2 * 64 * 100 * 1000 / 1e12
    # three numbers in bf16 and two in float32, and the matrix's gradient once for all tokens
    logits += 1000 * 100 * (3 * 2 + 2 * 4 + 2 * 4 * 64 / 3000) / (1000e9 * 0.8)
    optimizer = 40 * MODEL.parameters / (1000e9 * 0.8)
    expected = 3 * (forward + forward + backward + logits) + optimizer  # recomputed once
    assert cost.step_seconds == pytest.approx(expected, rel=1e-12)
    assert cost.busy_seconds[0] == pytest.approx(expected, rel=1e-12)


def test_without_recompute_forward_runs_once() -> None:
    problem = problem_for(cluster_of(1), MODEL, seq_len=1000)
    kept = replace(problem, workload=replace(problem.workload, recompute="none"))

    layer = evaluate(problem, one_each(1000)).group_seconds
    kept_layer = evaluate(kept, one_each(1000)).group_seconds
    forward = 1000 * LINEAR + 4 * 1000 * 1001 / 2 * PAIR_FORWARD
    assert (layer - kept_layer)[0] == pytest.approx(forward)


def test_balanced_causal_halves_work_and_contiguous_charges_the_last_rank() -> None:
    problem = problem_for(cluster_of(4), MODEL, seq_len=4000)
    balanced = evaluate(problem, one_each(1000, 1000, 1000, 1000))
    contiguous = evaluate(problem, one_each(*[1000] * 4, arrangement="contiguous"))

    per_pair = 4 * (2 * PAIR_FORWARD + PAIR_BACKWARD)
    last = 4000 * 4001 / 2 - 3000 * 3001 / 2
    expected = [4 * 1000 * LINEAR + per_pair * pairs for pairs in (1000 * 4001 / 2, last)]
    measured = [balanced.group_seconds.max(), contiguous.group_seconds[3]]
    assert measured == pytest.approx(expected, rel=1e-6)


def test_a_group_ends_each_phase_with_its_slowest_rank() -> None:
    problem = problem_for(cluster_of_nodes(["card", "half"]), MODEL, seq_len=900)

    # the slow rank has most token-wise work, the fast one most attention
    cost = evaluate(problem, one_replica(Group((0, 1), (500, 400), (3, 1))))

    forward = max(500, 2 * 400) * LINEAR + max(3, 2 * 1) * 900 * 901 / 2 * PAIR_FORWARD
    assert cost.directions[0][0] == pytest.approx(forward, rel=1e-6)


def test_a_group_of_one_has_no_barrier_and_no_all_to_all() -> None:
    slow = problem_for(cluster_of(2, network_gb_per_s=1e-3), MODEL, seq_len=1000)
    alone = evaluate(slow, one_replica(Group((0,), (1000,), (4,))))

    expected = 1000 * LINEAR + 4 * 1000 * 1001 / 2 * PAIR_FORWARD
    assert alone.directions[0][0] == pytest.approx(expected)


def test_all_to_alls_take_their_fullest_port_four_times_a_layer() -> None:
    slow = problem_for(cluster_of(2, network_gb_per_s=1e-3), MODEL, seq_len=1000)
    free = problem_for(cluster_of(2), MODEL, seq_len=1000)
    pair = one_replica(Group((0, 1), (700, 300), (1, 3)))

    forward, backward = (
        getattr(evaluate(slow, pair), direction).shuffle[0]
        - getattr(evaluate(free, pair), direction).shuffle[0]
        for direction in ("forward", "backward")
    )
    rate = 0.75e-3 * 1e9
    row = 16 * 2  # of one head in bf16; heads [0, 1) read KV head 0, [1, 4) both
    q_and_kv = max(700 * (3 + 2 * 2), 300 * (1 + 2 * 1)) * row  # rank 0 sends most
    out = max(700 * 3, 300 * 1) * row
    assert forward == pytest.approx((q_and_kv + out) / rate, rel=1e-5)
    do_and_delta = 700 * 3 * (row + 4)
    dq_dk_dv = 700 * (3 * row + 2 * 2 * 16 * 4)
    assert backward == pytest.approx((do_and_delta + dq_dk_dv) / rate, rel=1e-5)


def test_without_nvlink_both_kinds_of_traffic_share_the_port() -> None:
    def shuffle(**node: float) -> float:
        problem = problem_for(
            cluster_of_nodes(["card"] * 2, count=2, network_gb_per_s=1.0, **node),
            MODEL,
            seq_len=1000,
        )
        group = Group((0, 1, 2, 3), (250,) * 4, (1,) * 4)
        return float(evaluate(problem, one_replica(group)).forward.shuffle[0])

    # one peer in the node, two outside it at half the rate: 250 * (1 + 2) * 32 bytes to each, and o
    row = 250 * (3 + 1) * 32
    shared = max((1 + 2) * row / 0.75e9, 2 * row / 0.5e9)
    assert shuffle() == pytest.approx(shared, rel=1e-5)
    apart = max(row / (0.75 * 1.5e9), 2 * row / 0.5e9)
    assert shuffle(intra_gb_per_s=1.5) == pytest.approx(apart, rel=1e-5)
    # no faster than the card's own link: that link, over a longer path, or as it was measured
    assert shuffle(intra_gb_per_s=0.8) == pytest.approx((1 + 2) * row / 0.6e9, rel=1e-5)
    measured = max((1 + 2) * row / 0.9e9, 2 * row / 0.5e9)
    assert shuffle(intra_gb_per_s=1.2) == pytest.approx(measured, rel=1e-5)


def test_computing_and_transfers_slow_each_other_while_both_last() -> None:
    assert together(3.0, 0.0) == (3.0, 0.0)
    assert together(3.0, 1.0) == (3.0 + COMPUTE_SLOWDOWN, 1.0 + TRANSFER_SLOWDOWN)
    assert together(1.0, 3.0) == (1.0 + COMPUTE_SLOWDOWN, 3.0 + TRANSFER_SLOWDOWN)


@pytest.mark.parametrize("network_gb_per_s", [1e3, 0.5, 0.02])
def test_an_equal_ring_follows_the_longest_path(network_gb_per_s: float) -> None:
    cluster = cluster_of_nodes(
        ["card"], count=4, intra_gb_per_s=1e9, network_gb_per_s=network_gb_per_s
    )
    problem = problem_for(cluster, MODEL, ExchangePlan(chunk_tokens=100), seq_len=4000)
    cost = evaluate(problem, one_each(1000, 1000, 1000, 1000))

    # the outermost rank takes in all of the three others; the innermost gives to three all it has
    busy = 4 * 1000 * 4001 / 2 * PAIR_FORWARD
    token = 2 * 2 * 2 * 16  # k and v of two heads in bf16
    rate = 0.8e9 * network_gb_per_s
    ends = []
    for index in range(4):
        taken = 1000 * (3 - index) + 500 * index
        given = 1000 * index + 500 * (3 - index)
        moving = max(taken, given) * token / rate
        chunks = max(10 * (3 - index) + 5 * index, 10 * index + 5 * (3 - index))
        batches = np.ceil(chunks / 2)
        both = min(busy, moving)
        computing = busy + COMPUTE_SLOWDOWN * both
        moving += TRANSFER_SLOWDOWN * both
        rest = 3 / 4 * computing
        ends.append(max(computing, moving / batches + rest, moving + rest / batches))
    assert cost.forward.exchanged.tolist() == pytest.approx(ends, rel=1e-6)
    assert cost.forward.attention.tolist() == pytest.approx([busy] * 4)


def test_backward_answers_every_fetch_in_float32() -> None:
    cluster = cluster_of_nodes(["card"], count=2, intra_gb_per_s=1e9, network_gb_per_s=1e-3)
    problem = problem_for(cluster, MODEL, ExchangePlan(chunk_tokens=100), seq_len=4000)
    backward = evaluate(problem, one_each(2000, 2000)).backward

    token, rate = 2 * 2 * 2 * 16, 0.8e6
    # rank 0 takes 2000 tokens and gives 1000; answers, twice as wide, go the other way; 10 batches
    moving = max(2000 + 2 * 1000, 1000 + 2 * 2000) * token / rate
    slowed = moving + TRANSFER_SLOWDOWN * backward.attention[0]
    last_answer = (moving - 2000 * token / rate) / 10
    rest = (1 + COMPUTE_SLOWDOWN) * backward.attention[0] / 2
    expected = slowed + rest / 10 + last_answer
    assert backward.exchanged[0] == pytest.approx(expected, rel=1e-6)


def test_fsdp_moves_even_shards_over_all_ranks_and_hides_behind_layers() -> None:
    model = replace(MODEL, layers=3, hidden=512)
    problem = problem_for(cluster_of(2, nodes=2, network_gb_per_s=1.0), model, seq_len=64)

    gather, reduce_scatter = fsdp_seconds(problem)
    in_node = 3 / 4 / 0.75e9  # a rank passes on all shards but its own
    across = 2 / 4 / (2 * 0.8e9)  # two NICs take in the other node's half
    assert gather == pytest.approx(2 * model.parameters_per_layer * max(in_node, across))
    assert reduce_scatter == pytest.approx(2 * gather)
    outside = model.parameters - 3 * model.parameters_per_layer
    expected = 6 * outside * in_node + 2 * gather + reduce_scatter
    assert boundary_seconds(problem) == pytest.approx(expected)

    cost = evaluate(problem, one_each(64))  # so few tokens that FSDP decides
    forward = cost.directions[0][0]
    assert cost.layer_seconds[0] == pytest.approx(gather + TRANSFER_SLOWDOWN * forward)


def test_replicas_run_side_by_side_and_the_slowest_paces_the_layer() -> None:
    problem = problem_for(cluster_of_nodes(["card", "half"]), MODEL, seq_len=1000, global_batch=3)
    fast, slow = Group((0,), (2000,), (4,)), Group((1,), (1000,), (4,))
    cost = evaluate(problem, Layout("", (Replica((fast,), 2), Replica((slow,), 1)), 1))

    forward = 2000 * LINEAR + 2 * 4 * 1000 * 1001 / 2 * PAIR_FORWARD
    assert cost.directions[0].tolist() == pytest.approx([forward, forward])
    assert cost.forward.exchanged.tolist() == cost.forward.attention.tolist()


def test_exchange_and_fsdp_share_the_nic() -> None:
    """The links are slow and there is little to compute: what goes through the NICs adds up."""
    model = replace(MODEL, layers=3, hidden=512)
    nodes = cluster_of(1, nodes=2, network_gb_per_s=0.01)
    problem = problem_for(nodes, model, seq_len=8192, causal=False)
    cost = evaluate(problem, one_each(4096, 4096))

    gather, reduce_scatter = fsdp_seconds(problem)
    assert gather == pytest.approx(2 * model.parameters_per_layer / 2 / 0.8e7)
    rows = 4096 * model.kv_heads  # of the other's K and V
    fetched = 2 * 2 * rows * model.head_dim / 0.8e7
    assert cost.forward.nic.tolist() == pytest.approx([fetched] * 2)
    assert cost.backward.nic.tolist() == pytest.approx([3 * fetched] * 2)  # dK, dV in float32
    forward, backward = cost.layer_seconds
    assert cost.directions[0].max() < forward == pytest.approx(gather + fetched)
    assert backward >= gather + reduce_scatter + 4 * fetched  # forward runs again


@pytest.mark.parametrize("seed", range(10))
def test_a_replica_costs_the_same_beside_others(seed: int) -> None:
    rng = Random(seed)
    problem = drawn_problem(rng)
    layout = drawn_layout(rng, problem)
    together = evaluate(problem, layout)

    alone = [evaluate(problem, replace(layout, replicas=(replica,))) for replica in layout.replicas]
    seconds = np.concatenate([cost.group_seconds for cost in alone])
    assert together.group_seconds.tolist() == pytest.approx(seconds.tolist(), rel=1e-12)
    for index, cost in enumerate(alone):
        part = together.of_replica(index, "part")
        assert part.layout == replace(cost.layout, name="part")
        assert part.step_seconds == pytest.approx(cost.step_seconds, rel=1e-12)
        assert part.memory_bytes.tolist() == cost.memory_bytes.tolist()


@pytest.mark.parametrize("seed", range(20))
def test_terms_are_not_negative_and_add_up_to_the_step_on_every_rank(seed: int) -> None:
    rng = Random(seed)
    problem = drawn_problem(rng)
    if seed % 2:
        problem = replace(problem, workload=replace(problem.workload, recompute="none"))
    cost = evaluate(problem, drawn_layout(rng, problem))

    terms = terms_of(cost)
    step = cost.step_seconds
    assert all((seconds >= -1e-9 * step).all() for seconds in terms.values())
    assert sum(terms.values()).tolist() == pytest.approx([step] * problem.cluster.world_size)
    own = ("token-wise", "attention", "logits", "optimizer")
    busy = sum(s for name, s in terms.items() if name.endswith(own) and "wait" not in name)
    assert busy.tolist() == pytest.approx(cost.busy_seconds.tolist())


def test_measured_rates_go_before_the_peak_by_head_dim_and_length() -> None:
    rates = [
        {"work": "attention_forward", "head_dim": 16, "tokens": 0, "tflops": 0.1},
        {"work": "attention_forward", "head_dim": 16, "tokens": 512, "tflops": 0.2},
        {"work": "attention_forward", "head_dim": 16, "tokens": 4096, "tflops": 0.3},
        {"work": "attention_forward", "head_dim": 128, "tflops": 0.9},
        {"work": "gemm_backward", "tflops": 0.7},
    ]
    card = CARD | {"rates": rates}
    cluster = Cluster.from_mapping({"nodes": [{"name": "a", "gpus": ["x"]}], "gpus": {"x": card}})

    for seq_len, tflops in ((100, 0.1), (512, 0.2), (4095, 0.2), (100_000, 0.3)):
        found = problem_for(cluster, MODEL, seq_len=seq_len).rates
        assert found.attention_forward.tolist() == pytest.approx([tflops * 1e12])
    assert found.attention_backward.tolist() == [0.25e12]
    assert (found.gemm_forward[0], found.gemm_backward[0]) == (1e12, pytest.approx(0.7e12))


def test_named_documents_are_counted_as_the_runtime_deals_them() -> None:
    lengths = (700, 40, 40, 1200, 20)
    problem = problem_for(cluster_of(3), MODEL, seq_len=2000, documents=lengths)
    cost = evaluate(problem, one_each(1000, 600, 400))

    plan = Plan.from_splits(*[[Split((count,), (4,)) for count in (1000, 600, 400)]])
    documents = whole_documents(lengths)
    dealt = deal(plan, 0, lengths)
    pairs = [visible_pairs([s for run in group for s in run], documents, CAUSAL) for group in dealt]
    expected = [4 * count * PAIR_FORWARD for count in pairs]
    assert cost.forward.attention.tolist() == pytest.approx(expected)
    assert sum(pairs) == pytest.approx(2000 * problem.workload.pairs_per_token)

    fluid = evaluate(problem, one_each(1000, 600, 400), fluid=True).forward.attention
    assert fluid.sum() == pytest.approx(sum(expected))
    assert fluid[0] == pytest.approx(fluid.sum() / 2)


def test_twice_the_tokens_cost_more_seconds_and_no_less_memory() -> None:
    rng = Random(7)
    for _ in range(30):
        problem = drawn_problem(rng)
        layout = drawn_layout(rng, problem)
        before = evaluate(problem, layout)
        after = evaluate(_longer(problem), _doubled(layout))

        assert after.step_seconds > before.step_seconds
        assert (after.memory_bytes >= before.memory_bytes).all()


def _longer(problem: Problem) -> Problem:
    workload = problem.workload
    return replace(problem, workload=replace(workload, seq_len=2 * workload.seq_len))


def _doubled(layout: Layout) -> Layout:
    replicas = [
        replace(
            replica,
            groups=tuple(
                replace(group, tokens=tuple(2 * count for count in group.tokens))
                for group in replica.groups
            ),
        )
        for replica in layout.replicas
    ]
    return replace(layout, replicas=tuple(replicas))


def test_presets_of_any_shape_can_be_priced() -> None:
    for name in ("tiny", "7b", "llama3-8b", "70b"):
        problem = problem_for(cluster_of(1), ModelSpec.load(name), seq_len=64)
        heads = problem.model.heads
        assert evaluate(problem, one_replica(Group((0,), (64,), (heads,)))).step_seconds > 0
