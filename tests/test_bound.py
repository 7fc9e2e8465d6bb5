"""The lower bound against layouts of every kind that the evaluator can judge."""

from __future__ import annotations

import math
import pkgutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
from drawn_problems import EXAMPLES, drawn_layout, drawn_problem, problem_for
from tiny_problems import with_little_memory

import hexiseq_triton.planner
from hexiseq_triton.planner.bound import fewest_passes, lower_bound, lower_bound_seconds
from hexiseq_triton.planner.bound_cut import cut_seconds
from hexiseq_triton.planner.bound_heads import whole_heads_seconds
from hexiseq_triton.planner.bound_phases import phases_seconds
from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.cost import Cost, evaluate
from hexiseq_triton.planner.densities import densities, tokens_above
from hexiseq_triton.planner.fsdp import boundary_seconds, optimizer_seconds
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.overlap import Overlap
from hexiseq_triton.planner.partition import apportion
from hexiseq_triton.planner.plans import ExchangePlan
from hexiseq_triton.planner.problem import Group, Layout, Problem, Replica
from hexiseq_triton.planner.rates import MEMORY_LIMIT_SHARE, Floats
from hexiseq_triton.planner.workload import Workload

ROUNDING = 1 + 1e-12
EXAMPLE_OF_FOUR = Cluster.load(EXAMPLES / "2-fast-2-slow.yaml")


def with_documents(rng: Random, problem: Problem) -> Problem:
    """Return the problem with a sequence cut into documents at random."""
    seq_len = problem.workload.seq_len
    cuts = (rng.randint(1, seq_len - 1) for _ in range(rng.randint(1, 5)))
    edges = sorted({0, seq_len, *cuts})
    lengths = tuple(b - a for a, b in pairwise(edges))
    return replace(problem, workload=replace(problem.workload, documents=lengths))


def with_slow_links(rng: Random, problem: Problem) -> Problem:
    """Return the problem on a cluster whose links are up to 10,000 times slower."""
    slower = 10 ** -rng.uniform(1, 4)
    devices = tuple(
        replace(
            device,
            in_node_gb_per_s=device.in_node_gb_per_s * slower,
            across_gb_per_s=device.across_gb_per_s * slower,
        )
        for device in problem.cluster.devices
    )
    return replace(problem, cluster=replace(problem.cluster, devices=devices))


def drawn_problems(seed: int, count: int) -> Iterator[Problem]:
    rng = Random(seed)
    for number in range(count):
        problem = drawn_problem(rng)
        if number % 3 == 1:
            problem = with_slow_links(rng, problem)
        if number % 4 == 2:
            problem = with_documents(rng, problem)
        if number % 6 == 4:
            problem = with_little_memory(rng, problem)
        if number % 5 == 3:
            measured = Overlap(compute_slowdown=0.0, transfer_slowdown=0.02)
            problem = replace(problem, cluster=replace(problem.cluster, overlap=measured))
        yield problem


def by_speed(rng: Random, problem: Problem, layout: Layout) -> Layout:
    """Return the layout's groups with tokens and heads in proportion to the ranks' speeds."""
    speed = np.rint(problem.rates.gemm_forward / 1e9).astype(int)
    attention = np.rint(problem.rates.attention_forward / 1e9).astype(int)
    replicas = []
    for replica in layout.replicas:
        ranks = [rank for group in replica.groups for rank in group.ranks]
        tokens = iter(apportion(replica.num_tokens, speed[ranks].tolist()))
        groups = [
            replace(
                group,
                tokens=tuple(next(tokens) for _ in group.ranks),
                heads=tuple(apportion(problem.model.heads, attention[list(group.ranks)].tolist())),
            )
            for group in replica.groups
        ]
        replicas.append(replace(replica, groups=tuple(groups)))
    arrangement = rng.choice(["balanced", "contiguous"])
    return replace(layout, replicas=tuple(replicas), arrangement=arrangement)


def layouts_held_against_the_bound(num_problems: int) -> Counter[str]:
    """Fail if a layout beats the bound; return how many of each kind were looked at.

    Each problem gets 20 layouts. Half have tokens and heads in proportion to the ranks' speeds, the
    others are arbitrary. Those that do not fit in memory are left out.
    """
    drawn: Counter[str] = Counter()
    rng = Random(1)
    for problem in drawn_problems(seed=0, count=num_problems):
        bound = lower_bound(problem, whole_heads=True)
        assert bound is not None
        for number in range(20):
            layout = drawn_layout(rng, problem)
            if number % 2:
                layout = by_speed(rng, problem, layout)
            cost = evaluate(problem, layout)
            if not cost.fits:
                continue
            assert bound.seconds <= cost.step_seconds * ROUNDING, (problem, layout)
            drawn["layouts"] += 1
            drawn[layout.arrangement] += 1
            drawn["within 5 %"] += int(bound.seconds > 0.95 * cost.step_seconds)
            drawn[f"bound by {bound.binding}"] += 1
            drawn["communication-bound"] += int(bound.computing < 0.5 * cost.step_seconds)
    return drawn


def test_no_drawn_layout_beats_the_bound() -> None:
    """`bench/planner_experiments.py` looks at more than 10,000 layouts."""
    drawn = layouts_held_against_the_bound(num_problems=120)
    print(dict(drawn))
    assert drawn["layouts"] >= 2000
    for kind in ("contiguous", "within 5 %", "communication-bound"):
        assert drawn[kind] >= 100, kind


def test_one_gpu_meets_its_bound() -> None:
    cluster = Cluster.from_mapping({"nodes": [{"name": "a", "gpus": ["H100-SXM"]}]})
    problem = problem_for(cluster, "3b", seq_len=8192)
    alone = Layout("", (Replica((Group((0,), (8192,), (problem.model.heads,)),)),), 8)

    seconds = evaluate(problem, alone).step_seconds
    assert seconds == pytest.approx(lower_bound_seconds(problem), rel=1e-9)


def test_alike_gpus_are_bound_by_work_over_rate() -> None:
    problem = problem_for(Cluster.load(EXAMPLES / "8xh100-8xa100.yaml"), "7b", seq_len=4096)
    per_token, per_pair = np.full(16, 2e-6), np.full(16, 3e-9)

    tokens = 8 * 4096
    pairs = 8 * 4096 * 4097 / 2
    expected = (2e-6 * tokens + 3e-9 * pairs) / 16
    assert phases_seconds(problem, per_token, per_pair) == pytest.approx(expected, rel=1e-9)


def test_two_gpus_that_differ_in_kind_are_bound_by_the_best_they_can_do_together() -> None:
    """Every token sees as many keys, so one group of both is best: work over rate, by phase."""
    problem = problem_for(EXAMPLE_OF_FOUR, "tiny", seq_len=1000, causal=False, global_batch=1)
    per_token, per_pair = np.array([1.0, 2.0, 3.0, 4.0]), np.array([0.02, 0.01, 0.01, 0.03])

    expected = 1000 / (1 / per_token).sum() + 1e6 / (1 / per_pair).sum()
    assert phases_seconds(problem, per_token, per_pair) == pytest.approx(expected, rel=1e-4)
    assert phases_seconds(problem, per_token, per_pair) <= expected * ROUNDING


def test_one_head_cannot_be_shared() -> None:
    """A group of both GPUs has attention on one of them, and each by itself is no faster."""
    problem = problem_for(EXAMPLE_OF_FOUR, "tiny", seq_len=1000, causal=False, global_batch=1)
    problem = replace(problem, model=replace(problem.model, heads=1, kv_heads=1))
    per_token, per_pair = np.array([1.0, 4.0]), np.array([0.01, 0.001])

    fluid = phases_seconds(problem, per_token, per_pair)
    alone = 1000 / (1 / (per_token + 1000 * per_pair)).sum()
    together = 1000 / (1 / per_token).sum() + 1e6 * per_pair.min()
    found = whole_heads_seconds(problem, per_token, per_pair)
    assert found == pytest.approx(min(alone, together), rel=1e-4)
    assert fluid * 1.05 < found <= min(alone, together) * ROUNDING


@pytest.mark.parametrize("heads", [2, 5, 64])
def test_with_many_heads_whole_ones_bound_as_fractions_do(heads: int) -> None:
    problem = problem_for(EXAMPLE_OF_FOUR, "tiny", seq_len=1000, global_batch=2)
    problem = replace(problem, model=replace(problem.model, heads=heads, kv_heads=1))
    rng = np.random.default_rng(heads)
    per_token, per_pair = rng.uniform(1, 3, 4), rng.uniform(0.01, 0.03, 4)

    fluid = phases_seconds(problem, per_token, per_pair)
    found = whole_heads_seconds(problem, per_token, per_pair)
    assert fluid * (1 - 1e-5) <= found <= fluid * (1 + 2 / heads)


def test_too_many_compositions_are_left_alone() -> None:
    problem = problem_for(EXAMPLE_OF_FOUR, "tiny", seq_len=1000)
    rates = np.repeat([1.0, 2.0, 3.0], 200)

    assert whole_heads_seconds(problem, rates, rates) == 0.0


def best_split_of_two(problem: Problem, per_token: Floats, per_pair: Floats) -> float:
    """Return the least time of two ranks, each a group, over all contiguous splits."""
    count = problem.workload.seq_len
    first = np.arange(count + 1.0)
    before = first * (first + 1) / 2
    pairs = count * (count + 1) / 2
    times = []
    for a, b in ((0, 1), (1, 0)):
        early = per_token[a] * first + per_pair[a] * before
        late = per_token[b] * (count - first) + per_pair[b] * (pairs - before)
        times.append(float(np.maximum(early, late).min()))
    return min(times)


def test_contiguous_runs_may_beat_the_balanced_ideal_but_not_the_bound() -> None:
    """A GPU good at token-wise work takes the early tokens, which see few keys."""
    cluster = Cluster.from_mapping({"nodes": [{"name": "a", "gpus": {"L4": 2}}]})
    problem = problem_for(cluster, "tiny", seq_len=400, global_batch=1)
    per_token, per_pair = np.array([1.0, 0.3]), np.array([0.011, 0.0015])

    ideal = 400 / (1 / per_token).sum() + 400 * 401 / 2 / (1 / per_pair).sum()
    best = best_split_of_two(problem, per_token, per_pair)
    bound = phases_seconds(problem, per_token, per_pair)
    assert bound <= best < ideal


@pytest.mark.parametrize("causal", [True, False])
def test_densities_stand_for_all_tokens(causal: bool) -> None:
    documents = (1, 2, 7, 7, 300, 1000)
    workload = Workload(seq_len=1317, documents=documents, causal=causal)
    seen = np.concatenate(
        [np.arange(1.0, n + 1) if causal else np.full(n, float(n)) for n in documents]
    )

    work = densities(workload)
    assert work.tokens.sum() == pytest.approx(1317)
    assert work.tokens @ work.pairs == pytest.approx(seen.sum())
    assert 0.999 * np.sqrt(seen).sum() < work.tokens @ np.sqrt(work.pairs) <= np.sqrt(seen).sum()
    keys = np.array([0.0, 1.0, 6.5, 7.0, 250.0, 2000.0])
    assert tokens_above(workload, keys).tolist() == [(seen > key).sum() for key in keys]


def test_rows_that_must_enter_bound_gpus_without_room_for_a_sequence() -> None:
    def ring_on(memory_gb: float) -> Cost:
        card = {"dense_tflops": 1000, "memory_gb": memory_gb, "network_gb_per_s": 0.001}
        nodes = [{"name": "a", "count": 16, "gpus": ["card"]}]
        cluster = Cluster.from_mapping({"nodes": nodes, "gpus": {"card": card}})
        exchange = ExchangePlan(chunk_tokens=32)
        model = replace(ModelSpec.load("tiny"), ffn=4096)  # tokens take more than their heads
        problem = problem_for(cluster, model, exchange, seq_len=1 << 20, global_batch=1)
        groups = tuple(Group((r,), (65536,), (problem.model.heads,)) for r in range(16))
        return evaluate(problem, Layout("", (Replica(groups),), 1))

    # barely enough memory for 1/16 of the sequence in each
    ring = ring_on(1.00001 * ring_on(8).memory_bytes.max() / MEMORY_LIMIT_SHARE / 1e9)
    problem = ring.problem
    bound = lower_bound(problem)
    assert ring.fits
    assert bound is not None
    assert bound.computing < bound.layers < bound.cut <= ring.step_seconds
    # tokens that see more than a quarter of the keys, forward twice and backward: a row of q and
    # one of o for each of the 8 heads; every GPU is a node, with a port of 0.8 MB/s
    rows = 3 * problem.model.layers * 3 * (1 << 18) * 8 * 2
    beside = boundary_seconds(problem) + optimizer_seconds(problem).max()
    assert bound.cut - beside == pytest.approx(rows * 32 / (16 * 0.8e6), rel=1e-6)


def test_nothing_need_enter_the_only_gpu() -> None:
    cluster = Cluster.from_mapping({"nodes": [{"name": "a", "gpus": ["L4"]}]})
    problem = problem_for(cluster, "tiny", seq_len=4096)

    assert cut_seconds(problem, 1, np.array([1.0])) == 0.0


def test_memory_says_how_few_passes_a_step_has() -> None:
    cluster = Cluster.load(EXAMPLES / "8xh100-8xa100.yaml")

    assert fewest_passes(problem_for(cluster, "7b", seq_len=131072)) == 1
    assert fewest_passes(problem_for(cluster, "7b", seq_len=1 << 20)) == 4
    assert fewest_passes(problem_for(cluster, "7b", seq_len=1 << 22)) is None
    assert lower_bound_seconds(problem_for(cluster, "7b", seq_len=1 << 22)) == math.inf
    assert lower_bound_seconds(problem_for(EXAMPLE_OF_FOUR, "70b", seq_len=4096)) == math.inf


def test_bound_loads_nothing_of_the_search(tmp_path: Path) -> None:
    search = {"search", "solve", "groupings", "layouts", "split", "partition"}
    modules = {module.name for module in pkgutil.iter_modules(hexiseq_triton.planner.__path__)}
    assert search <= modules
    code = (
        "import sys, types, hexiseq_triton.planner as planner\n"
        "loaded = [name for name in sys.modules if name.startswith(planner.__name__ + '.')]\n"
        "for name in loaded: del sys.modules[name]\n"
        "import hexiseq_triton.planner.bound\n"
        "print(*(name.rpartition('.')[2] for name in sys.modules"
        " if name.startswith(planner.__name__ + '.')))"
    )
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True, text=True)

    assert search.isdisjoint(printed.stdout.split())
