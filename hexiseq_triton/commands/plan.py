"""`hexiseq plan`: plan a cluster, print the plan, write it to a file."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from hexiseq_triton.commands.files import GpuFileOption
from hexiseq_triton.commands.options import file_to_write, lengths_of
from hexiseq_triton.errors import ConfigError
from hexiseq_triton.planner.bound import lower_bound
from hexiseq_triton.planner.certify import certify
from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.cost import Cost
from hexiseq_triton.planner.explain import cost_of
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.plans import Plan, RankShare
from hexiseq_triton.planner.rates import MEMORY_LIMIT_SHARE
from hexiseq_triton.planner.solve import SEARCH, STRATEGIES, plan
from hexiseq_triton.planner.solve import max_seq_len as plan_longest
from hexiseq_triton.planner.terms import Terms, terms_of
from hexiseq_triton.planner.workload import Workload
from hexiseq_triton.reports.plan_tables import (
    assumed_lines,
    bound_line,
    certificate_line,
    print_plan,
    step_line,
    terms_tables,
)
from hexiseq_triton.reports.terminal import print_line, print_table, terminal


def plan_command(
    cluster: Annotated[Path, typer.Option(help="cluster file (YAML)")],
    model: Annotated[str, typer.Option(help="preset name, config.json, or YAML file")],
    seq_len: Annotated[int | None, typer.Option(help="tokens of one sequence")] = None,
    max_seq_len: Annotated[
        bool, typer.Option("--max-seq-len", help="plan for the longest sequence that fits")
    ] = False,
    documents: Annotated[
        str | None, typer.Option(help="lengths of the documents in a sequence: 3000,1096")
    ] = None,
    global_batch: Annotated[int, typer.Option(help="sequences in one step")] = 8,
    accumulation: Annotated[
        int | None, typer.Option(help="passes in one step; the planner's choice if left out")
    ] = None,
    recompute: Annotated[
        Literal["full", "none"], typer.Option(help="what backward computes again")
    ] = "full",
    strategy: Annotated[str, typer.Option(help=", ".join(STRATEGIES))] = SEARCH,
    gpus: GpuFileOption = None,
    what_if: Annotated[
        bool, typer.Option("--what-if", help="plan for GPUs that cannot run the kernels, too")
    ] = False,
    memory_limit_share: Annotated[
        float, typer.Option(help="how much of each GPU's memory may be used")
    ] = MEMORY_LIMIT_SHARE,
    time_limit_seconds: Annotated[float | None, typer.Option(help="when to end the search")] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="print what each rank's step consists of")
    ] = False,
    check_splits: Annotated[
        bool,
        typer.Option("--certify", help="let CBC tighten the bound, and seek better splits"),
    ] = False,
    report: Annotated[
        Path | None, typer.Option(help="write an HTML page with plots", callback=file_to_write)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="write the plan to this file", callback=file_to_write)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Find the fastest plan for training MODEL on CLUSTER."""
    if (seq_len is None) != max_seq_len:
        raise ConfigError("give one of --seq-len and --max-seq-len")
    if max_seq_len and documents is not None:
        raise ConfigError("--documents fill a --seq-len; they say nothing of the longest sequence")
    workload: dict[str, Any] = {
        "global_batch": global_batch,
        "accumulation": accumulation,
        "recompute": recompute,
        "documents": lengths_of(documents),
    }
    options: dict[str, Any] = {
        "strategy": strategy,
        "what_if": what_if,
        "memory_limit_share": memory_limit_share,
        "time_limit_seconds": time_limit_seconds,
    }
    loaded_cluster, loaded_model = Cluster.load(cluster, gpus), ModelSpec.load(model)
    start = time.perf_counter()
    if seq_len is None:
        result = plan_longest(loaded_cluster, loaded_model, **workload, **options)
    else:
        result = plan(loaded_cluster, loaded_model, seq_len=seq_len, **workload, **options)
    planning_seconds = time.perf_counter() - start

    steps = Workload(result.seq_len, **workload)
    cost = cost_of(result, loaded_cluster, loaded_model, steps, memory_limit_share)
    if out is not None:
        result.save(out)
    if report is not None:
        from hexiseq_triton.reports.plan_report import write_report  # matplotlib is slow to import

        write_report(report, result, loaded_cluster, terms_of(cost))
    certificates = certify(cost) if check_splits else []
    bound = lower_bound(cost.problem, whole_heads=check_splits)
    assert bound is not None, "the plan fits"
    if as_json:
        summary = plan_summary(result, loaded_cluster, terms_of(cost) if explain else None)
        summary["certificates"] = [asdict(certificate) for certificate in certificates]
        summary["bounds"] = asdict(bound) | {"binding": bound.binding}
        print(json.dumps(summary | {"planning_seconds": planning_seconds}))
        return
    console = terminal()
    print_plan(result, console)
    for line in assumed_lines(loaded_cluster):
        print_line(line, console)
    if check_splits or explain:
        print_line(bound_line(bound), console)
    if certificates:
        print_line(certificate_line(certificates), console)
    if explain:
        _print_terms(result, cost, console)


def _print_terms(plan: Plan, cost: Cost, console: Console) -> None:
    for table in terms_tables(plan, terms_of(cost)):
        print_table(table, console)
    print_line(step_line(cost), console)


def plan_summary(plan: Plan, cluster: Cluster, terms: Terms | None) -> dict[str, Any]:
    """Return what `--json` prints of a plan, with the terms of its step if they are asked for."""
    explained = {"terms": {name: list(values) for name, values in terms.items()}} if terms else {}
    return explained | {
        "strategy": plan.strategy,
        "seq_len": plan.seq_len,
        "accumulation": plan.accumulation,
        "sequences": [replica.sequences for replica in plan.replicas],
        "executable": plan.executable,
        "notes": plan.notes,
        "predicted": plan.predicted and asdict(plan.predicted),
        "lower_bound_seconds": plan.lower_bound_seconds,
        "gap": plan.gap,
        "gap_parts": plan.gap_parts,
        "baselines": {name: asdict(baseline) for name, baseline in plan.baselines.items()},
        "assumed": {gpu: cluster.assumed(gpu) for gpu in cluster.gpus},
        "groups": [
            {"replica": index, "ranks": [_rank_summary(share) for share in group.ranks]}
            for index, replica in enumerate(plan.replicas)
            for group in replica.groups
        ],
    }


def _rank_summary(share: RankShare) -> dict[str, Any]:
    fields = ("rank", "gpu", "tokens", "q_heads", "kv_heads", "memory_bytes", "memory_limit_bytes")
    return {field: getattr(share, field) for field in fields}
