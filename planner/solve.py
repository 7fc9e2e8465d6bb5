"""From a cluster, a model and a workload to a plan: baselines, search, bound, one answer."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

from hexiseq_triton.errors import ConfigError, InfeasibleError
from hexiseq_triton.planner.bound import lower_bound_seconds
from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.cost import Cost
from hexiseq_triton.planner.files import build
from hexiseq_triton.planner.heads import kv_heads_of
from hexiseq_triton.planner.layouts import BASELINES, Priced, out_of_memory, price
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.plans import (
    BaselineResult,
    ExchangePlan,
    GroupPlan,
    Plan,
    Prediction,
    RankShare,
    ReplicaPlan,
)
from hexiseq_triton.planner.problem import Group, Problem
from hexiseq_triton.planner.search import best_asymmetric, fits
from hexiseq_triton.planner.workload import Workload

SEARCH = "hexiseq"
STRATEGIES = (SEARCH, *BASELINES)


def plan(
    cluster: Cluster | str | Path,
    model: ModelSpec | str | Path,
    *,
    seq_len: int,
    global_batch: int = 8,
    accumulation: int | None = None,
    recompute: Literal["full", "none"] = "full",
    causal: bool = True,
    strategy: str = SEARCH,
) -> Plan:
    """Return the fastest plan found for training `model` on `cluster`.

    Args:
        cluster: a Cluster, or the path of a cluster file.
        model: a ModelSpec, a preset's name, or the path of a config.json or YAML file.
        seq_len: tokens of one sequence.
        global_batch: sequences in one optimizer step.
        accumulation: passes in one step; as many as sequences if left out.
        recompute: "full" keeps only layer inputs for backward, "none" keeps everything.
        causal: whether a token sees only tokens before it.
        strategy: "hexiseq" takes the best of the asymmetric layouts and all baselines; a
            baseline's name takes that one's best layout.

    Raises:
        ConfigError: if a file or an argument is wrong.
        InfeasibleError: if nothing fits; the message names the binding constraint.
    """
    problem = _problem(cluster, model, seq_len, global_batch, accumulation, recompute, causal)
    if strategy not in STRATEGIES:
        raise ConfigError(f"strategy is {strategy!r}; it is one of {', '.join(STRATEGIES)}")
    baselines = {name: price(problem, name) for name in BASELINES}
    if strategy == SEARCH:
        cost, description = _best(problem, baselines)
    else:
        cost, description = _baseline(problem, strategy, baselines[strategy])
    result = _plan(problem, cost, description, baselines)
    result.validate()
    return result


def _problem(
    cluster: Cluster | str | Path,
    model: ModelSpec | str | Path,
    seq_len: int,
    global_batch: int,
    accumulation: int | None,
    recompute: str,
    causal: bool,
) -> Problem:
    """Return the checked problem."""
    fields: dict[str, object] = {"seq_len": seq_len, "global_batch": global_batch}
    fields |= {"recompute": recompute, "causal": causal}
    if accumulation is not None:
        fields["accumulation"] = accumulation
    problem = Problem(
        cluster if isinstance(cluster, Cluster) else Cluster.load(cluster),
        model if isinstance(model, ModelSpec) else ModelSpec.load(model),
        build(Workload, fields, "plan"),
        ExchangePlan(),
    )
    for name, gpu in problem.cluster.gpus.items():
        if not gpu.runnable:
            raise InfeasibleError(f"{name} cannot run this package's kernels: {gpu.reason}")
    return problem


def _best(problem: Problem, baselines: dict[str, Priced]) -> tuple[Cost, str]:
    """Return the best layout of all, and what it is called."""
    found = {f"{name}: {b.cost.layout.name}": b.cost for name, b in baselines.items() if b.cost}
    to_beat = min((cost.step_seconds for cost in found.values()), default=float("inf"))
    ours = best_asymmetric(problem, to_beat)
    if ours is not None and ours.fits:
        found[f"{SEARCH}: {ours.layout.name}"] = ours
    if not found:
        assert ours is not None
        raise InfeasibleError(_does_not_fit(problem, ours))
    name = min(found, key=lambda name: found[name].step_seconds)
    return found[name], name


def _baseline(problem: Problem, name: str, priced: Priced) -> tuple[Cost, str]:
    if priced.cost is None:
        raise InfeasibleError(f"{name}: {priced.reason}")
    return priced.cost, f"{name}: {priced.cost.layout.name}"


def _does_not_fit(problem: Problem, nearest: Cost) -> str:
    """Say what binds, and the longest sequence for which a plan is found."""
    seq_len = longest_seq_len(problem)
    advice = (
        f"the longest seq_len that fits is {seq_len}"
        if seq_len
        else "no seq_len fits: use more GPUs, a smaller model or GPUs with more memory"
    )
    reason = out_of_memory(problem, nearest)
    return f"seq_len {problem.workload.seq_len} does not fit: {reason}; {advice}"


def longest_seq_len(problem: Problem) -> int:
    """Return the longest sequence, within 1 %, below the problem's for which memory suffices."""
    low, high = 0, problem.workload.seq_len
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        if fits(replace(problem, workload=replace(problem.workload, seq_len=middle))):
            low = middle
        else:
            high = middle
    return low


def _plan(problem: Problem, cost: Cost, strategy: str, baselines: dict[str, Priced]) -> Plan:
    """Write down a layout as a plan with its predictions and what it was compared with."""
    workload, model = problem.workload, problem.model
    bound = lower_bound_seconds(problem)
    arrangement = cost.layout.arrangement
    groups = tuple(_group_plan(problem, cost, group) for group in cost.layout.groups)
    return Plan(
        world_size=problem.cluster.world_size,
        seq_len=workload.seq_len,
        num_heads=model.heads,
        num_kv_heads=model.kv_heads,
        replicas=(ReplicaPlan(groups, workload.sequences),),
        head_dim=model.head_dim,
        causal=workload.causal,
        accumulation=workload.accumulation,
        recompute=workload.recompute,
        exchange=replace(problem.exchange, arrangement=arrangement),
        strategy=strategy,
        predicted=Prediction(
            cost.step_seconds,
            workload.global_batch * workload.seq_len / cost.step_seconds,
        ),
        lower_bound_seconds=bound,
        gap=cost.step_seconds / bound - 1,
        baselines={
            name: BaselineResult(priced.cost.step_seconds if priced.cost else None, priced.reason)
            for name, priced in baselines.items()
        },
        device_names={name: gpu.device_names for name, gpu in problem.cluster.gpus.items()},
        made_from={
            "cluster": problem.cluster.digest,
            "model": _digest(model),
            "workload": _digest(workload),
        },
    )


def _group_plan(problem: Problem, cost: Cost, group: Group) -> GroupPlan:
    q_per_kv = problem.model.heads // problem.model.kv_heads
    shares = []
    start = 0
    for rank, tokens, count in zip(group.ranks, group.tokens, group.heads, strict=True):
        device, q_heads = problem.cluster.devices[rank], (start, start + count)
        shares.append(
            RankShare(
                rank=rank,
                tokens=tokens,
                q_heads=q_heads,
                kv_heads=kv_heads_of(q_heads, q_per_kv),
                gpu=device.gpu,
                node=device.node,
                memory_bytes=int(cost.memory_bytes[rank]),
                memory_limit_bytes=int(cost.memory_limit[rank]),
                seconds=float(cost.busy_seconds[rank]),
            )
        )
        start += count
    return GroupPlan(tuple(shares))


def _digest(noun: ModelSpec | Workload) -> str:
    content = asdict(noun)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
