"""The longest sequence: `plan` has an answer for it, and none for one a little longer."""

from __future__ import annotations

from random import Random

import pytest
from drawn_problems import EXAMPLES, problem_for

from hexiseq_triton.errors import InfeasibleError
from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.longest import longest_seq_len
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.problem import Problem
from hexiseq_triton.planner.solve import max_seq_len, plan

SLOW = {"dense_tflops": 0.5, "memory_gb": 80, "network_gb_per_s": 25}
FULL = {"dense_tflops": 400, "memory_gb": 4, "network_gb_per_s": 0.1}
ROOMY = {"dense_tflops": 5, "memory_gb": 200, "network_gb_per_s": 1}
CARDS = ["H100-SXM", "A100-SXM-40GB", "L4", "RTX-4090", "L40S", "slow", "full", "roomy"]


def cluster_of(*nodes: dict[str, int]) -> Cluster:
    """Return nodes of cards of the table and of the invented ones."""
    entries = [{"name": f"n{i}", "gpus": gpus} for i, gpus in enumerate(nodes)]
    cards = {"slow": SLOW, "full": FULL, "roomy": ROOMY}
    return Cluster.from_mapping({"nodes": entries, "gpus": cards, "inter_gb_per_s": 5})


def drawn(rng: Random) -> Problem:
    nodes = [
        {card: rng.randint(1, 3) for card in rng.sample(CARDS, rng.randint(1, 2))}
        for _ in range(rng.randint(1, 3))
    ]
    heads = rng.choice([3, 7, 12])
    model = ModelSpec(
        layers=rng.randint(1, 5),
        hidden=64 * rng.randint(1, 20),
        heads=heads,
        kv_heads=rng.choice([1, heads]),
        head_dim=rng.choice([64, 128]),
        ffn=rng.randint(1, 3000),
        vocab=rng.randint(2, 40000),
    )
    options = {"global_batch": rng.choice([1, 2, 3]), "recompute": rng.choice(["full", "none"])}
    return problem_for(cluster_of(*nodes), model, seq_len=1, **options)


def planned(problem: Problem, seq_len: int) -> bool:
    """Return whether `plan` has an answer."""
    workload = problem.workload
    try:
        plan(
            problem.cluster,
            problem.model,
            seq_len=seq_len,
            global_batch=workload.global_batch,
            recompute=workload.recompute,
        )
    except InfeasibleError:
        return False
    return True


@pytest.mark.parametrize("seed", range(8))
def test_a_plan_exists_up_to_the_longest_sequence_and_not_beyond(seed: int) -> None:
    problem = drawn(Random(seed))
    longest = longest_seq_len(problem)

    assert not planned(problem, int(1.02 * longest) + 2048)
    assert not longest or planned(problem, longest)


@pytest.mark.parametrize(
    ("cluster", "model", "at_least"),
    [
        # fast cards fill up first, and the slow ones hold as much
        (cluster_of({"H100-SXM": 1, "slow": 3}), {"kv_heads": 1, "head_dim": 128}, 6_000_000),
        # cards without room for tokens may be idle
        (cluster_of({"full": 2, "H100-SXM": 1}), {"kv_heads": 3, "head_dim": 64}, 1_000_000),
    ],
)
def test_slow_and_full_cards_do_not_shorten_the_longest_sequence(
    cluster: Cluster, model: dict[str, int], at_least: int
) -> None:
    spec = ModelSpec(layers=3, hidden=640, heads=3, ffn=2559, vocab=7235, **model)
    assert max_seq_len(cluster, spec, global_batch=1).seq_len >= at_least


def test_the_longest_sequence_of_128_cards_has_a_plan_and_twice_as_long_has_none() -> None:
    cluster = Cluster.load(EXAMPLES / "128-gpus-4-models.yaml")
    problem = problem_for(cluster, "llama3-8b", seq_len=1, global_batch=1)
    longest = longest_seq_len(problem)

    assert longest > 12_000_000  # 8.6 million while fast cards were full before slow ones
    assert planned(problem, longest)
    assert not planned(problem, 2 * longest)
