"""From a cluster, a model and a workload to a plan: baselines, search, bound, one answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from hexiseq_triton.errors import ConfigError, InfeasibleError
from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.cost import Cost, evaluate
from hexiseq_triton.planner.files import build
from hexiseq_triton.planner.layouts import BASELINES, Priced, out_of_memory, prices
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.plans import ExchangePlan, Plan
from hexiseq_triton.planner.problem import Problem, checked_memory_limit_share
from hexiseq_triton.planner.rates import MEMORY_LIMIT_SHARE
from hexiseq_triton.planner.workload import Workload
from hexiseq_triton.planner.write import written

SEARCH = "hexiseq"
SIMULATED = "simulated"
DESCENTS = {"descent_proportional": 1.0, "descent_sqrt": 0.5}
"""Coordinate descent from tokens in proportion to this power of a group's speed."""
STRATEGIES = (SEARCH, SIMULATED, *DESCENTS, *BASELINES)

_HEURISTIC = "heuristic: the search takes the documents' work as even along a sequence"
_CUT_SHORT = "the search was cut short by its time limit; without one there may be a better plan"


def plan(
    cluster: Cluster | str | Path,
    model: ModelSpec | str | Path,
    *,
    seq_len: int,
    documents: Sequence[int] | None = None,
    global_batch: int = 8,
    accumulation: int | None = None,
    recompute: Literal["full", "none"] = "full",
    causal: bool = True,
    strategy: str = SEARCH,
    memory_limit_share: float = MEMORY_LIMIT_SHARE,
    time_limit_seconds: float | None = None,
    what_if: bool = False,
) -> Plan:
    """Return the fastest plan found for training `model` on `cluster`.

    Args:
        cluster: a Cluster, or the path of a cluster file.
        model: a ModelSpec, a preset's name, or the path of a config.json or YAML file.
        seq_len: tokens of one sequence.
        documents: lengths of the documents in a sequence; one document if left out.
        global_batch: sequences in one optimizer step.
        accumulation: passes in one step; the planner's choice if left out.
        recompute: "full" keeps only layer inputs for backward, "none" keeps everything.
        causal: whether a token sees only tokens before it.
        strategy: "hexiseq" takes the best of the search and of all baselines that the runtime can
            carry out; "simulated" lets the simulator choose among the best of them, which takes
            seconds instead of tenths and pays where nodes share slow links; a baseline's name takes
            that one's best layout; "descent_proportional" and "descent_sqrt" are a plain coordinate
            descent, to compare the search with.
        memory_limit_share: how much of each GPU's memory may be used.
        time_limit_seconds: when to end the search; the plan then says so in its notes. Plans made
            without a limit are the same every time. Not for "simulated".
        what_if: plan for GPUs that cannot run this package's kernels too.

    Raises:
        ConfigError: if a file or an argument is wrong.
        InfeasibleError: if nothing fits; the message names the binding constraint.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(f"strategy is {strategy!r}; it is one of {', '.join(STRATEGIES)}")
    if strategy == SIMULATED and time_limit_seconds is not None:
        raise ConfigError(
            f"time_limit_seconds is {time_limit_seconds}, and the strategy is {SIMULATED!r}, which "
            f"looks at a fixed number of layouts; leave the limit out, or take {SEARCH!r}"
        )
    if time_limit_seconds is not None and not time_limit_seconds >= 0:
        raise ConfigError(f"time_limit_seconds is {time_limit_seconds}; it is seconds, from 0")
    fields = {
        "seq_len": seq_len,
        "documents": documents,
        "global_batch": global_batch,
        "accumulation": accumulation,
        "recompute": recompute,
        "causal": causal,
    }
    problem = _problem(cluster, model, fields, memory_limit_share)
    unrunnable = _unrunnable(problem.cluster)
    if unrunnable and not what_if:
        raise InfeasibleError("; ".join(unrunnable))
    baselines = prices(problem)
    notes = []
    if strategy == SEARCH:
        cost, description, cut_short = _searched(problem, baselines, time_limit_seconds)
        notes = [_CUT_SHORT] if cut_short else []
    elif strategy == SIMULATED:
        cost, note = _simulated(problem)
        description, notes = f"{SIMULATED}: {cost.layout.name}", [note]
    elif strategy in DESCENTS:
        cost, description = _descended(problem, strategy), strategy
    else:
        cost, description = _baseline(strategy, baselines[strategy])
    if documents is not None:
        notes.append(_HEURISTIC)
    if not cost.layout.executable:
        notes.append(f"the runtime does not exchange KV by {cost.layout.exchange}")
    result = written(cost.problem, cost, description, baselines, [*notes, *unrunnable])
    result = replace(result, executable=result.executable and not unrunnable)
    result.validate()
    return result


def max_seq_len(
    cluster: Cluster | str | Path,
    model: ModelSpec | str | Path,
    *,
    memory_limit_share: float = MEMORY_LIMIT_SHARE,
    **options: Any,
) -> Plan:
    """Return the plan for the longest sequence that fits in memory, to a thousandth.

    A little longer, and the search finds nothing that fits. With a baseline as `strategy`, the
    baseline has to fit at this length.

    Args:
        cluster: as for `plan`.
        model: as for `plan`.
        memory_limit_share: as for `plan`.
        options: further arguments of `plan`; neither `seq_len` nor `documents`.

    Raises:
        ConfigError: if a file or an argument is wrong.
        InfeasibleError: if no sequence fits.
    """
    from hexiseq_triton.planner.longest import longest_seq_len  # numba is slow to import

    names = ("global_batch", "accumulation", "recompute", "causal")
    fields = {name: options[name] for name in names if name in options}
    problem = _problem(cluster, model, {"seq_len": 1} | fields, memory_limit_share)
    seq_len = longest_seq_len(problem)
    if not seq_len:
        raise InfeasibleError(_does_not_fit(problem))
    return plan(
        problem.cluster,
        problem.model,
        seq_len=seq_len,
        memory_limit_share=memory_limit_share,
        **options,
    )


def _problem(
    cluster: Cluster | str | Path,
    model: ModelSpec | str | Path,
    fields: Mapping[str, object],
    memory_limit_share: float,
) -> Problem:
    """Return the checked problem."""
    return Problem(
        cluster if isinstance(cluster, Cluster) else Cluster.load(cluster),
        model if isinstance(model, ModelSpec) else ModelSpec.load(model),
        build(Workload, {name: value for name, value in fields.items() if value is not None}),
        ExchangePlan(),
        checked_memory_limit_share(memory_limit_share),
    )


def _unrunnable(cluster: Cluster) -> list[str]:
    return [
        f"{name} cannot run this package's kernels: {gpu.reason}"
        for name, gpu in cluster.gpus.items()
        if not gpu.runnable
    ]


def _searched(
    problem: Problem, baselines: Mapping[str, Priced], time_limit_seconds: float | None
) -> tuple[Cost, str, bool]:
    """Return the best layout of all, what it is called, and whether time ended the search."""
    from hexiseq_triton.planner.search import Search  # numba is slow to import
    from hexiseq_triton.planner.warm_up import warm_up

    warm_up()
    found = {
        f"{name}: {priced.cost.layout.name}": priced.cost
        for name, priced in baselines.items()
        if priced.cost and priced.executable
    }
    start = min(found.values(), key=lambda cost: cost.step_seconds, default=None)
    search = Search(problem, time_limit_seconds=time_limit_seconds)
    ours = search.best(start)
    if ours.fits:
        found[f"{SEARCH}: {ours.layout.name}"] = evaluate(problem, ours.layout)
    if not found:
        raise InfeasibleError(_does_not_fit(problem))
    name = min(found, key=lambda name: found[name].step_seconds)
    return found[name], name, search.cut_short


def _simulated(problem: Problem) -> tuple[Cost, str]:
    from hexiseq_triton.planner.simulated import simulated  # numba is slow to import

    found = simulated(problem)
    if found is None:
        raise InfeasibleError(_does_not_fit(problem))
    return found


def _descended(problem: Problem, strategy: str) -> Cost:
    from hexiseq_triton.planner.descent import descended  # numba is slow to import

    cost = evaluate(problem, descended(problem, DESCENTS[strategy]).layout)
    if not cost.fits:
        raise InfeasibleError(f"{strategy}: {out_of_memory(problem, cost)}")
    return cost


def _baseline(name: str, priced: Priced) -> tuple[Cost, str]:
    if priced.cost is None:
        raise InfeasibleError(f"{name}: {priced.reason}")
    return priced.cost, f"{name}: {priced.cost.layout.name}"


def _does_not_fit(problem: Problem) -> str:
    """Say what binds, and the longest sequence for which a plan is found."""
    from hexiseq_triton.planner.capacity import roomiest
    from hexiseq_triton.planner.longest import longest_seq_len
    from hexiseq_triton.planner.stages import Splitter

    seq_len = longest_seq_len(problem)
    advice = (
        f"the longest seq_len that fits is {seq_len}"
        if seq_len
        else "no seq_len fits: use more GPUs, a smaller model or GPUs with more memory"
    )
    reason = out_of_memory(problem, roomiest(Splitter(problem)))
    return f"seq_len {problem.workload.seq_len} does not fit: {reason}; {advice}"
