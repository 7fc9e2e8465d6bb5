"""`hexiseq plan`: plan a cluster, print the plan, write it to a file."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.heads import HeadRange
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.plans import Plan, RankShare
from hexiseq_triton.planner.solve import SEARCH, STRATEGIES, plan


def plan_command(
    cluster: Annotated[Path, typer.Option(help="cluster file (YAML)")],
    model: Annotated[str, typer.Option(help="preset name, config.json, or YAML file")],
    seq_len: Annotated[int, typer.Option(help="tokens of one sequence")],
    global_batch: Annotated[int, typer.Option(help="sequences in one step")] = 8,
    accumulation: Annotated[
        int | None, typer.Option(help="passes in one step; one a sequence if left out")
    ] = None,
    recompute: Annotated[
        Literal["full", "none"], typer.Option(help="what backward computes again")
    ] = "full",
    strategy: Annotated[str, typer.Option(help=", ".join(STRATEGIES))] = SEARCH,
    out: Annotated[Path | None, typer.Option(help="write the plan to this file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Find the fastest plan for training MODEL on CLUSTER."""
    loaded_cluster, loaded_model = Cluster.load(cluster), ModelSpec.load(model)
    start = time.perf_counter()
    result = plan(
        loaded_cluster,
        loaded_model,
        seq_len=seq_len,
        global_batch=global_batch,
        accumulation=accumulation,
        recompute=recompute,
        strategy=strategy,
    )
    planning_seconds = time.perf_counter() - start
    if out is not None:
        result.save(out)
    if as_json:
        print(json.dumps(plan_summary(result) | {"planning_seconds": planning_seconds}))
    else:
        print_plan(result, Console())


def plan_summary(plan: Plan) -> dict[str, Any]:
    """Return what `--json` prints of a plan."""
    predicted = plan.predicted
    return {
        "strategy": plan.strategy,
        "predicted": predicted
        and {
            "step_seconds": predicted.step_seconds,
            "tokens_per_second": predicted.tokens_per_second,
        },
        "lower_bound_seconds": plan.lower_bound_seconds,
        "gap": plan.gap,
        "baselines": {
            name: {"step_seconds": baseline.step_seconds, "reason": baseline.reason}
            for name, baseline in plan.baselines.items()
        },
        "groups": [
            {"replica": index, "ranks": [_rank_summary(share) for share in group.ranks]}
            for index, replica in enumerate(plan.replicas)
            for group in replica.groups
        ],
    }


def _rank_summary(share: RankShare) -> dict[str, Any]:
    fields = ("rank", "gpu", "tokens", "q_heads", "kv_heads", "memory_bytes", "memory_limit_bytes")
    return {field: getattr(share, field) for field in fields}


def print_plan(plan: Plan, console: Console) -> None:
    """Print who holds what, what it is predicted to take, and what it was compared with."""
    console.print(plan_table(plan))
    if plan.baselines:
        console.print(baseline_table(plan))
    if plan.predicted and plan.lower_bound_seconds is not None and plan.gap is not None:
        console.print(
            f"{plan.predicted.step_seconds:.4g} s a step, "
            f"{plan.predicted.tokens_per_second:,.0f} tokens/s; no plan can be faster than "
            f"{plan.lower_bound_seconds:.4g} s (gap {plan.gap:.1%})"
        )


def plan_table(plan: Plan) -> Table:
    """Return a table with one row a rank, a section a group; unknown figures are a dash."""
    table = Table(title=plan.strategy)
    for name in ("group", "rank", "gpu", "node"):
        table.add_column(name)
    for name in ("tokens", "query heads", "KV heads", "busy s", "memory GB"):
        table.add_column(name, justify="right")
    groups = [(r, group) for r, replica in enumerate(plan.replicas) for group in replica.groups]
    for index, (replica, group) in enumerate(groups):
        label = str(index) if len(plan.replicas) == 1 else f"{index} (replica {replica})"
        for share in group.ranks:
            table.add_row(label, *_cells(share))
            label = ""
        table.add_section()
    return table


def _cells(share: RankShare) -> list[str]:
    memory = "-"
    if share.memory_bytes is not None and share.memory_limit_bytes is not None:
        memory = f"{share.memory_bytes / 1e9:.1f} of {share.memory_limit_bytes / 1e9:.1f}"
    return [
        str(share.rank),
        share.gpu or "-",
        share.node or "-",
        f"{share.tokens:,}",
        _heads(share.q_heads),
        _heads(share.kv_heads),
        "-" if share.seconds is None else f"{share.seconds:.4g}",
        memory,
    ]


def _heads(heads: HeadRange) -> str:
    return f"[{heads[0]}, {heads[1]})"


def baseline_table(plan: Plan) -> Table:
    """Return a table of the layouts the plan was compared with."""
    table = Table(title="baselines")
    table.add_column("layout")
    table.add_column("seconds a step", justify="right")
    table.add_column("plan is faster by", justify="right")
    table.add_column("note")
    for name, baseline in plan.baselines.items():
        seconds, ratio = "-", "-"
        if baseline.step_seconds is not None:
            seconds = f"{baseline.step_seconds:.4g}"
            if plan.predicted:
                ratio = f"{baseline.step_seconds / plan.predicted.step_seconds:.2f}x"
        table.add_row(name, seconds, ratio, baseline.reason or "")
    return table
