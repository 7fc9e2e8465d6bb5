"""The whole planner against all layouts of tiny problems, against baselines, and on processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from brute_force import best_layout, choices, least_seconds, structures
from drawn_problems import drawn_problem
from equality import largest_errors
from pool import TIMEOUT, Pool
from tiny_problems import tiny_problem

from hexiseq_triton.errors import InfeasibleError
from hexiseq_triton.planner import Cluster, ModelSpec, Plan, plan
from hexiseq_triton.planner.bound import lower_bound
from hexiseq_triton.planner.cost import evaluate
from hexiseq_triton.planner.explain import cost_of
from hexiseq_triton.planner.problem import Problem
from hexiseq_triton.train import train
from hexiseq_triton.training_config import CorpusOptions, TrainingConfig

ROUNDING = 1 + 1e-12


def test_brute_force_leaves_out_no_layout_that_could_be_best() -> None:
    """`least_seconds`, by which layouts are left out, is at most what the evaluator says."""
    rng = Random(5)
    for _ in range(30):
        problem = tiny_problem(rng)
        for structure in rng.sample(list(structures(problem)), 4):
            batch = choices(problem, structure, 1)
            least = least_seconds(problem, batch)
            for index in rng.sample(range(len(least)), min(10, len(least))):
                for layout in batch.layouts(index):
                    cost = evaluate(problem, layout)
                    assert least[index] <= cost.step_seconds * ROUNDING or not cost.fits


def planned(problem: Problem) -> Plan:
    workload = problem.workload
    return plan(
        problem.cluster,
        problem.model,
        seq_len=workload.seq_len,
        global_batch=workload.global_batch,
        causal=workload.causal,
    )


def ratios_to_the_best(seeds: Iterable[int]) -> list[float]:
    """Return, for one tiny problem a seed, the plan's step over that of the best layout.

    Fails if a problem is called infeasible that is not, or the best layout beats the bound.
    """
    ratios = []
    for seed in seeds:
        problem = tiny_problem(Random(seed))
        try:
            found = planned(problem)
        except InfeasibleError:
            assert best_layout(problem, unit=1) is None, seed
            continue
        cost = cost_of(found, problem.cluster, problem.model, problem.workload)
        assert cost.fits, seed
        best = best_layout(problem, unit=1, below=cost.step_seconds)
        least = best.step_seconds if best else cost.step_seconds
        bound = lower_bound(problem, whole_heads=True)
        assert bound is not None, seed
        assert bound.seconds <= least * ROUNDING, seed
        ratios.append(cost.step_seconds / least)
    return ratios


def test_plans_are_best_or_nearly_so() -> None:
    """`bench/planner_experiments.py` looks at 100 problems."""
    ratios = ratios_to_the_best(range(12))

    assert len(ratios) >= 10
    assert sum(ratio <= 1.01 for ratio in ratios) >= 0.95 * len(ratios)
    assert max(ratios) <= 1.05


def test_no_plan_is_worse_than_a_baseline_the_runtime_can_carry_out() -> None:
    """`bench/planner_experiments.py` looks at 100 clusters."""
    assert sum(held_against_baselines(seed) for seed in range(5)) >= 20


def held_against_baselines(seed: int) -> int:
    """Fail if the plan for a drawn cluster is worse than a baseline; return how many there were."""
    problem = drawn_problem(Random(seed))
    found = planned(problem)
    assert found.predicted is not None
    executable = [
        baseline.step_seconds
        for baseline in found.baselines.values()
        if baseline.executable and baseline.step_seconds is not None
    ]
    assert all(found.predicted.step_seconds <= s * (1 + 1e-9) for s in executable), seed
    return len(executable)


# -------------------------------------------------------------------- on real processes


def drawn_plan(rng: Random, kv_heads: int, causal: bool) -> Plan:
    """Return the plan for five GPUs of up to three models in up to three nodes."""
    cards = {
        name: {
            "dense_tflops": 10 ** rng.uniform(-3, -1),
            "memory_gb": 8,
            "network_gb_per_s": 10 ** rng.uniform(-2, 1),
        }
        for name in ("one", "two", "three")
    }
    names = rng.choices(sorted(cards), k=5)
    cuts = sorted({0, 5, *rng.choices(range(1, 5), k=2)})
    nodes = [{"name": f"n{a}", "gpus": names[a:b]} for a, b in pairwise(cuts)]
    return plan(
        Cluster.from_mapping({"nodes": nodes, "gpus": cards}),
        ModelSpec(layers=2, hidden=48, heads=6, kv_heads=kv_heads, head_dim=8, ffn=64, vocab=256),
        seq_len=rng.choice([61, 150, 320]),
        global_batch=rng.choice([1, 3, 4]),
        causal=causal,
    )


def run_on_processes(pool: Pool, seeds: Iterable[int]) -> Counter[str]:
    """Fail if attention under a drawn plan is not dense attention; return the kinds of plans."""
    drawn: Counter[str] = Counter()
    for seed in seeds:
        rng = Random(seed)
        found = drawn_plan(rng, kv_heads=rng.choice([1, 2, 6]), causal=rng.random() < 0.8)
        assert found.executable
        lengths = [[found.seq_len] * replica.sequences for replica in found.replicas]
        errors = pool.run(largest_errors, found, lengths, 8, {"causal": found.causal}, seed)
        assert max(error for rank in errors for error in rank.values()) <= 1e-10, seed

        sizes = [[len(group.ranks) for group in replica.groups] for replica in found.replicas]
        drawn["plans"] += 1
        drawn["several replicas"] += len(sizes) > 1
        drawn["several groups in a replica"] += max(map(len, sizes)) > 1
        drawn["several ranks in a group"] += max(map(max, sizes)) > 1
    return drawn


def test_plans_run_and_give_dense_attention(pool: Pool) -> None:
    """`bench/planner_experiments.py` runs 20 plans."""
    drawn = run_on_processes(pool, range(4))
    print(dict(drawn))
    assert len(drawn) == 4
    assert min(drawn.values()) >= 1


def train_on_processes(pool: Pool, seeds: Iterable[int], folder: Path) -> Counter[str]:
    """Fail if `hexiseq train` cannot carry out a drawn plan; return how many it carried out."""
    (folder / "model.yaml").write_text(
        "{layers: 2, hidden: 48, heads: 6, kv_heads: 2, head_dim: 8, ffn: 64, vocab: 256}", "utf-8"
    )
    drawn: Counter[str] = Counter()
    for seed in seeds:
        config = TrainingConfig(
            model=str(folder / "model.yaml"),
            steps=2,
            lr=1e-3,
            out=str(folder / f"out-{seed}"),
            timeout_seconds=TIMEOUT.total_seconds(),
            corpus=CorpusOptions(max_document_tokens=300),
        )
        found = drawn_plan(Random(seed), kv_heads=2, causal=True)
        metrics = pool.run(trained, found, config)
        losses = [[metric.loss for metric in of_rank] for of_rank in metrics]
        assert all(of_rank == losses[0] for of_rank in losses), seed
        assert all(0 < loss < 10 for loss in losses[0]), seed
        drawn["plans"] += 1
        drawn["several replicas"] += len(found.replicas) > 1
    return drawn


def test_a_plan_trains(pool: Pool, tmp_path: Path) -> None:
    """`bench/planner_experiments.py` trains 20."""
    assert train_on_processes(pool, [4], tmp_path)["plans"] == 1


def trained(rank: int, plan: Plan, config: TrainingConfig) -> list[Any]:
    """Worker: train on the CPU."""
    return train(plan, config, device="cpu")
