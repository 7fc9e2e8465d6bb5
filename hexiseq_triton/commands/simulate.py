"""`hexiseq simulate`: run a plan's step without GPUs, print what it takes, draw it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hexiseq_triton.commands.files import GpuFileOption
from hexiseq_triton.commands.options import file_to_write, folder_to_write, lengths_of
from hexiseq_triton.errors import ConfigError
from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.explain import workload_of
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.plans import Plan
from hexiseq_triton.planner.simulator import Conditions, Mode, Simulation, simulate, simulate_plan
from hexiseq_triton.planner.simulator.lengths import at_length, powers_around
from hexiseq_triton.reports.simulate_tables import rank_table, section_table, summary_lines
from hexiseq_triton.reports.terminal import print_line, print_table, terminal

MOST_RANKS_LISTED = 64


def simulate_command(
    plan: Annotated[Path, typer.Option(help="plan file of `hexiseq plan`")],
    cluster: Annotated[Path, typer.Option(help="the cluster file it was made for")],
    model: Annotated[str, typer.Option(help="preset name, config.json, or YAML file")],
    documents: Annotated[
        str | None, typer.Option(help="lengths of the documents the plan was made for: 3000,1096")
    ] = None,
    gpus: GpuFileOption = None,
    mode: Annotated[
        Mode | None,
        typer.Option(help="how keys travel between groups; direct, the runtime's, if left out"),
    ] = None,
    engine: Annotated[
        Literal["fast", "event"],
        typer.Option(help="event: links are shared fairly; fast: one after the other"),
    ] = "event",
    jitter: Annotated[float, typer.Option(help="spread of every operation's length")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="of the jitter; 0 if left out")] = None,
    straggler: Annotated[
        list[str] | None, typer.Option(help="RANK:FACTOR, a rank that computes longer; repeatable")
    ] = None,
    oversubscription: Annotated[
        float, typer.Option(help="what a node's NICs send together, over what its uplink carries")
    ] = 1.0,
    copy_engine: Annotated[
        bool, typer.Option("--copy-engine", help="copy engines move keys inside nodes")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="write a trace for Perfetto", callback=file_to_write)
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(help="write plots as PNG into this folder", callback=folder_to_write),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="write an HTML page with plots", callback=file_to_write)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Simulate one training step of PLAN on CLUSTER; no GPU is needed."""
    if seed is not None and jitter == 0.0:
        raise ConfigError(
            f"--seed is {seed}, and nothing is random without --jitter; give it, such as 0.05"
        )
    conditions = Conditions(
        jitter, seed or 0, _stragglers(straggler or []), oversubscription, copy_engine
    )
    loaded_plan = Plan.load(plan)
    found = simulate_plan(
        loaded_plan,
        Cluster.load(cluster, gpus),
        ModelSpec.load(model),
        workload_of(loaded_plan, lengths_of(documents)),
        mode=mode,
        engine=engine,
        conditions=conditions,
    )
    if trace is not None:
        from hexiseq_triton.planner.simulator.trace import write_trace

        write_trace(trace, found)
    if plots is not None or report is not None:
        _draw(found, plots, report)
    if as_json:
        print(json.dumps(summary(found)))
        return
    console = terminal()
    for line in summary_lines(found):
        print_line(line, console)
    print_table(section_table(found), console)
    if len(found.compute_seconds) <= MOST_RANKS_LISTED:
        print_table(rank_table(found), console)


def _draw(found: Simulation, plots: Path | None, report: Path | None) -> None:
    # matplotlib is slow to import
    from hexiseq_triton.reports.simulate_plots import gantt, save_plots, throughput, time_by_phase
    from hexiseq_triton.reports.simulate_report import write_report

    others = [
        simulate(
            at_length(found.cost, seq_len),
            mode=found.mode,
            engine=found.engine,
            conditions=found.conditions,
        )
        for seq_len in powers_around(found.cost.problem.workload.seq_len)
    ]
    figures = {
        "One layer, rank by rank": gantt(found),
        "Time by phase": time_by_phase(found),
        "Throughput against length, in the plan's proportions": throughput(others),
    }
    if plots is not None:
        names = ("gantt", "phases", "throughput")
        save_plots(plots, dict(zip(names, figures.values(), strict=True)))
    if report is not None:
        write_report(report, found, figures)


def _stragglers(texts: list[str]) -> dict[int, float]:
    """Return the factors of "3:1.5" and the like, by rank."""
    found: dict[int, float] = {}
    for text in texts:
        rank, _, factor = text.partition(":")
        try:
            number, times = int(rank), float(factor)
        except ValueError as error:
            raise ConfigError(
                f"--straggler is {text!r}; it is RANK:FACTOR, such as 3:1.5"
            ) from error
        if number in found:
            raise ConfigError(f"--straggler {text}: rank {number} stands twice; give it once")
        found[number] = times
    return found


def summary(found: Simulation) -> dict[str, Any]:
    """Return what `--json` prints."""
    return {
        "mode": found.mode,
        "engine": found.engine,
        "step_seconds": found.step_seconds,
        "tokens_per_second": found.tokens_per_s,
        "mfu": found.mfu,
        "cost_model_step_seconds": found.cost.step_seconds,
        "layer_seconds": dict(zip(("forward", "backward"), found.layer_seconds, strict=True)),
        "sections": {
            name: {"runs": part.repeats, "seconds": part.seconds}
            for name, part in found.sections.items()
        },
        "ranks": [
            {
                "rank": rank,
                "compute_seconds": float(found.compute_seconds[rank]),
                "exposed_seconds": float(found.exposed_seconds[rank]),
                "idle_seconds": float(found.idle_seconds[rank]),
                "memory_bytes": float(found.memory_bytes[rank]),
                "memory_limit_bytes": float(found.cost.memory_limit[rank]),
            }
            for rank in range(len(found.compute_seconds))
        ],
    }
