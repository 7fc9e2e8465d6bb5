"""What the planner promises, measured: `python bench/planner_experiments.py [experiment ...]`.

Each experiment prints its rows and replaces its lines in bench/results/planner.jsonl, and
docs/planner-results.md is written anew from them. Without names all of them run, in about ten
minutes on one core.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from model_traffic import between_models
from planner_page import PAGE, keep, page

from hexiseq_triton.planner import Cluster, ModelSpec, Plan, Workload, plan
from hexiseq_triton.planner.balance import balanced
from hexiseq_triton.planner.explain import cost_of
from hexiseq_triton.planner.gpus import Figure
from hexiseq_triton.planner.plans import ExchangePlan
from hexiseq_triton.planner.problem import Problem
from hexiseq_triton.planner.stages import Frame, Splitter, whole_units

Row = dict[str, Any]
ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples" / "clusters"
FOUR_MODELS = ("H100-SXM", "A100-SXM-80GB", "A800-SXM-80GB", "L40S")
K = 1024


# -------------------------------------------------------------------- clusters


def four_models(nodes_of_each: int) -> Cluster:
    """Return nodes of eight, as many of each of four GPU models."""
    nodes = [{"name": gpu, "count": nodes_of_each, "gpus": {gpu: 8}} for gpu in FOUR_MODELS]
    return Cluster.from_mapping({"inter_gb_per_s": 25, "nodes": nodes})


def pinned(*nodes: tuple[str, int, int]) -> Cluster:
    """Return nodes of (GPU model, GPUs, count), where an H100 is three A100 in every phase."""

    def card(tflops: float, nvlink: float) -> Row:
        return {"dense_tflops": tflops, "memory_gb": 80, "nvlink_gb_per_s": nvlink}

    gpus = {"H100": card(936, 450), "A100": card(312, 300), "A800": card(312, 200)}
    content = [
        {"name": f"{gpu}-{size}", "count": count, "gpus": {gpu: size}} for gpu, size, count in nodes
    ]
    return Cluster.from_mapping({"inter_gb_per_s": 25, "nodes": content, "gpus": gpus})


def with_memory(cluster: Cluster, gigabytes: float) -> Cluster:
    """Return the cluster with cards of another memory."""
    figure = Figure(gigabytes, "assumed", "experiment")
    gpus = {name: replace(gpu, memory_gb=figure) for name, gpu in cluster.gpus.items()}
    return replace(cluster, gpus=gpus)


# -------------------------------------------------------------------- experiments


def planning_seconds() -> Iterator[Row]:
    """From parsed files to a validated plan, with all baselines, bound and memory, warm."""
    for cluster, target in (
        (Cluster.load(EXAMPLES / "8xh100-8xa100.yaml"), 0.3),
        (four_models(4), 0.5),
        (four_models(32), 5.0),
    ):
        for model, seq_len in (("7b", 128 * K), ("70b", 512 * K)):
            if model == "70b" and cluster.world_size == 16:
                continue  # its states do not fit

            once = partial(plan, cluster, ModelSpec.load(model), seq_len=seq_len)
            row = {"gpus": cluster.world_size, "model": model, "seq_len": seq_len}
            yield row | _timed(once, target)


def resplit_seconds() -> Iterator[Row]:
    """Tokens and heads of all groups anew, for a batch of another length; groups stay."""
    cluster, model = four_models(32), ModelSpec.load("70b")
    found = plan(cluster, model, seq_len=512 * K)
    lengths = iter(range(400 * K, 600 * K, 1600))
    yield {"gpus": cluster.world_size, "model": "70b"} | _timed(
        lambda: resplit(found, cluster, model, next(lengths)), 0.05
    )


def resplit(found: Plan, cluster: Cluster, model: ModelSpec, seq_len: int) -> list[Any]:
    """Return the groups of a plan with the tokens of a sequence of another length."""
    splitter = Splitter(Problem(cluster, model, Workload(seq_len), found.exchange))
    groups = []
    for replica in found.replicas:
        alone = len(replica.groups) == 1
        shares = [group.tokens / replica.tokens for group in replica.groups]
        total = replica.sequences * seq_len
        tokens = whole_units(total, [share * total for share in shares], splitter.unit)
        groups += [
            splitter.split(tuple(share.rank for share in group.ranks), count, alone)
            for group, count in zip(replica.groups, tokens, strict=True)
        ]
    return groups


def first_call_seconds() -> Iterator[Row]:
    """A new process, imports included, with numba's cache filled and empty."""
    code = (
        "from hexiseq_triton.planner import plan\n"
        f"print(plan({str(EXAMPLES / '8xh100-8xa100.yaml')!r}, '7b', seq_len=131072).to_json())"
    )
    printed = set()
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"NUMBA_CACHE_DIR": cache}
        for state, target in (("empty", 30.0), ("filled", 3.0)):
            started, before = time.perf_counter(), _children_seconds()
            command = [sys.executable, "-c", code]
            ran = subprocess.run(
                command, env=environment, cwd=cache, capture_output=True, check=True
            )
            seconds = time.perf_counter() - started
            printed.add(ran.stdout)
            yield {
                "cache": state,
                "seconds": round(seconds, 2),
                "cpu_seconds": round(_children_seconds() - before, 2),
                "target": target,
                "progress_line": ran.stderr.decode().strip(),
                "same_plan": len(printed) == 1,
            }


def gap_grid() -> Iterator[Row]:
    """The gap and its parts at global batch 8 on the 128-GPU example."""
    cluster = Cluster.load(EXAMPLES / "128-gpus-4-models.yaml")
    for model in ("7b", "13b", "70b"):
        for seq_len in (128 * K, 512 * K, 1024 * K):
            found = plan(cluster, model, seq_len=seq_len)
            assert found.gap is not None
            parts = {name: round(part, 4) for name, part in found.gap_parts.items()}
            yield {
                "model": model,
                "seq_len": seq_len,
                "gap": round(found.gap, 4),
                **parts,
                "target": 0.15 if seq_len == 128 * K else 0.05,
                "plan": found.strategy,
                "passes": found.accumulation,
                "replicas": len(found.replicas),
            }


def traffic() -> Iterator[Row]:
    """Ours against the same group sizes filled H100, A100, H100, A100, with stage III run again.

    8 H100 and 8 A100. The states of 70b alone take 70 GB of each of 16 GPUs, and no plan fits; its
    rows are for the same cards with 160 GB.
    """
    for model in ("7b", "13b", "llama3-8b", "70b"):
        cluster = Cluster.load(EXAMPLES / "8xh100-8xa100.yaml")
        if model == "70b":
            cluster = with_memory(cluster, 160)
        for seq_len in (32 * K, 128 * K):
            row: Row = {"model": model, "seq_len": seq_len}
            spec, workload = ModelSpec.load(model), Workload(seq_len)
            found = plan(cluster, spec, seq_len=seq_len)
            ours = cost_of(found, cluster, spec, workload)
            theirs = _round_robin(found, cluster, spec, workload)
            moved, round_robin = between_models(ours), between_models(theirs)
            yield row | {
                "seconds": ours.step_seconds,
                "round_robin_seconds": theirs.step_seconds,
                "round_robin_fits": theirs.fits,
                "gb_between_models": round(moved / 1e9, 1),
                "round_robin_gb": round(round_robin / 1e9, 1),
                "less_traffic": round(1 - moved / round_robin, 3) if round_robin else None,
                "sizes": str([[len(g.ranks) for g in r.groups] for r in found.replicas]),
            }


def _round_robin(found: Plan, cluster: Cluster, model: ModelSpec, workload: Workload) -> Any:
    """Return the cost of the plan's group sizes, dealt GPUs of both models in turn."""
    problem = Problem(cluster, model, workload, ExchangePlan())
    splitter = Splitter(problem)
    half = cluster.world_size // 2
    turn = chain.from_iterable(zip(range(half), range(half, 2 * half), strict=True))
    frame = Frame("round-robin", found.accumulation, found.exchange.arrangement)
    replicas = []
    for replica in found.replicas:
        grouping = [tuple(next(turn) for _ in group.ranks) for group in replica.groups]
        cost = balanced(splitter, frame, grouping, replica.sequences, rounds=6)
        replicas.append(cost.layout.replicas[0])
    return splitter.judged(frame, replicas)


def flop_matched() -> Iterator[Row]:
    """A mixed cluster against A100 of as many FLOP/s in all."""
    pairs = {
        "48 H100 + 8 A100": (pinned(("H100", 8, 6), ("A100", 8, 1)), 152),
        "52 H100 + 4 A100 + 8 A800": (
            pinned(("H100", 8, 6), ("H100", 4, 1), ("A100", 4, 1), ("A800", 8, 1)),
            168,
        ),
    }
    for name, (mixed, count) in pairs.items():
        alike = pinned(("A100", 8, count // 8))
        for model in ("13b", "70b"):
            for seq_len in (256 * K, 512 * K, 1024 * K):
                yield {"mixed": name, "alike": f"{count} A100", "model": model} | _matched(
                    mixed, alike, model, seq_len
                )


def _matched(mixed: Cluster, alike: Cluster, model: str, seq_len: int) -> Row:
    ours = plan(mixed, model, seq_len=seq_len)
    other = plan(alike, model, seq_len=seq_len)
    assert ours.predicted is not None
    priced = {n: b.step_seconds for n, b in other.baselines.items() if b.step_seconds is not None}
    best = min(priced, key=lambda name: priced[name])
    ulysses = priced.get("ulysses")
    heads = ModelSpec.load(model).heads
    return {
        "seq_len": seq_len,
        "tokens_per_s": round(ours.predicted.tokens_per_second),
        "ratio": round(priced[best] / ours.predicted.step_seconds, 4),
        "best_baseline": f"{best}: {other.baselines[best].reason}",
        "ratio_to_ulysses": ulysses and round(ulysses / ours.predicted.step_seconds, 4),
        "pure_ulysses": f"impossible: {alike.world_size} > {heads} heads",
        "target": 0.97,
        "gap": round(ours.gap or 0.0, 4),
    }


def proofs() -> Iterator[Row]:
    """The tests' checks in full number."""
    sys.path.append(str(ROOT / "tests"))
    import test_bound
    import test_planner_optimal
    from pool import Pool

    yield {"check": "bound <= step"} | dict(test_bound.layouts_held_against_the_bound(600))
    ratios = test_planner_optimal.ratios_to_the_best(range(100))
    yield {
        "check": "step over the brute-force optimum",
        "problems": len(ratios),
        "within 1 %": sum(ratio <= 1.01 for ratio in ratios),
        "largest": round(max(ratios), 4),
    }
    compared = sum(test_planner_optimal.held_against_baselines(seed) for seed in range(100))
    yield {"check": "never worse than an executable baseline", "clusters": 100, "pairs": compared}
    with Pool(5) as pool:
        drawn = test_planner_optimal.run_on_processes(pool, range(20))
    yield {"check": "attention of the plan on processes is dense attention"} | dict(drawn)


EXPERIMENTS: dict[str, Callable[[], Iterable[Row]]] = {
    function.__name__: function
    for function in (
        planning_seconds,
        resplit_seconds,
        first_call_seconds,
        gap_grid,
        traffic,
        flop_matched,
        proofs,
    )
}


# -------------------------------------------------------------------- timing


def _timed(once: Callable[[], object], target: float) -> Row:
    """Return medians of five calls after one, in seconds of the clock and of the CPU."""
    once()
    clock, cpu = [], []
    for _ in range(5):
        start, cpu_start = time.perf_counter(), time.process_time()
        once()
        clock.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
    return {
        "seconds": round(statistics.median(clock), 3),
        "cpu_seconds": round(statistics.median(cpu), 3),
        "target": target,
    }


def _children_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system


def explained() -> dict[str, str]:
    """Return what each experiment is."""
    return {name: str(function.__doc__) for name, function in EXPERIMENTS.items()}


def main(names: list[str]) -> None:
    for name in names or EXPERIMENTS:
        rows = []
        for row in EXPERIMENTS[name]():
            print(name, row, flush=True)
            rows.append(row)
        keep(name, rows)
    PAGE.write_text(page(explained()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
