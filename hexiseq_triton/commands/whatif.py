"""`hexiseq whatif`: what a cluster would do with other nodes or another network, at what cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import Progress

from hexiseq_triton.commands.files import GpuFileOption
from hexiseq_triton.commands.options import file_to_write
from hexiseq_triton.errors import ConfigError
from hexiseq_triton.planner.files import build
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.simulator import Mode
from hexiseq_triton.planner.variants import Variant, num_combinations, variants_of
from hexiseq_triton.planner.whatif import Outcome, judged, prices_of, unpriced
from hexiseq_triton.planner.workload import Workload
from hexiseq_triton.reports.terminal import print_line, print_table, terminal
from hexiseq_triton.reports.whatif_report import (
    frontier_plot,
    outcome_lines,
    outcomes_summary,
    outcomes_table,
)

FILE_WIDTH = 140
"""Columns of what goes to a file or another program."""


def whatif_command(
    cluster: Annotated[Path, typer.Option(help="cluster file (YAML)")],
    model: Annotated[str, typer.Option(help="preset name, config.json, or YAML file")],
    seq_len: Annotated[int, typer.Option(help="tokens of one sequence")],
    add: Annotated[
        list[str] | None, typer.Option(help="nodes that come: 8xH100, 2x8xH100; repeatable")
    ] = None,
    drop: Annotated[
        list[str] | None, typer.Option(help="nodes that go: node3, node3+node4; repeatable")
    ] = None,
    bandwidth: Annotated[
        list[str] | None,
        typer.Option(help="network between nodes: x2, or 50 GB/s for one GPU; repeatable"),
    ] = None,
    price: Annotated[
        list[str] | None, typer.Option(help="GPU=PRICE an hour of one: H100=2.5; repeatable")
    ] = None,
    global_batch: Annotated[int, typer.Option(help="sequences in one step")] = 8,
    recompute: Annotated[
        Literal["full", "none"], typer.Option(help="what backward computes again")
    ] = "full",
    gpus: GpuFileOption = None,
    mode: Annotated[
        Mode, typer.Option(help="how keys travel between groups; direct is the runtime's way")
    ] = "direct",
    plot: Annotated[
        Path | None,
        typer.Option(help="draw cost against throughput (PNG)", callback=file_to_write),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Judge CLUSTER as it is, and every combination of what might come, go or change."""
    changes = {"add": add or [], "drop": drop or [], "bandwidth": bandwidth or []}
    variants = variants_of(cluster, gpus=gpus, **changes)
    prices = prices_of(variants, price or ())
    missing = unpriced(variants, prices)
    if plot is not None and all(unpriced([variant], prices) for variant in variants):
        raise ConfigError(
            f"--plot draws cost against throughput, and no variant has a cost: no price for "
            f"{', '.join(missing)}; give --price GPU=PRICE"
        )
    fields = {"seq_len": seq_len, "global_batch": global_batch, "recompute": recompute}
    workload = build(Workload, fields)
    outcomes = _judged(variants, ModelSpec.load(model), workload, prices, mode)
    if plot is not None:
        from hexiseq_triton.reports.simulate_plots import png  # matplotlib is slow to import

        plot.write_bytes(png(frontier_plot(outcomes)))
    if as_json:
        print(json.dumps(outcomes_summary(outcomes, mode)))
        return
    console = terminal(FILE_WIDTH)
    print_table(outcomes_table(outcomes), console)
    left_out = num_combinations(*changes.values()) - len(variants)
    for line in outcome_lines(outcomes, mode, missing, left_out):
        print_line(line, console)


def _judged(
    variants: list[Variant],
    model: ModelSpec,
    workload: Workload,
    prices: dict[str, float],
    mode: Mode,
) -> list[Outcome]:
    """Judge the variants, and show how far it is where errors go: the output may be a file."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=len(variants))

        def done(outcome: Outcome) -> None:
            progress.update(bar, advance=1, description=outcome.variant.name)

        return judged(variants, model, workload, prices, mode=mode, done=done)
