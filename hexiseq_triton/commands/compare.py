"""`hexiseq compare`: several plans on the same ranks, predicted and measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hexiseq_triton.commands.train import (
    ClusterOption,
    EmulateLinks,
    EmulateMemory,
    EmulateSms,
    TrainingFile,
)


def compare_command(
    plan: Annotated[list[Path], typer.Option("--plan", help="a plan file; give two or more times")],
    config: TrainingFile,
    cluster: ClusterOption = None,
    emulate_sms: EmulateSms = None,
    emulate_memory_gb: EmulateMemory = None,
    emulate_link_gb_per_s: EmulateLinks = None,
) -> None:
    """Train a few steps under each plan, under torchrun, and print predicted against measured."""
    from hexiseq_triton.devices import local_device
    from hexiseq_triton.environment import check_started_by_torchrun

    check_started_by_torchrun("--no-python hexiseq compare ...")
    from hexiseq_triton.emulation.emulate import Emulation
    from hexiseq_triton.planner import Cluster, Plan
    from hexiseq_triton.reports.terminal import print_line, print_table, terminal
    from hexiseq_triton.tracing.compare import compare
    from hexiseq_triton.tracing.compare_report import comparison_table, order_lines
    from hexiseq_triton.training_config import TrainingConfig

    emulation = Emulation.parse(emulate_sms, emulate_memory_gb, emulate_link_gb_per_s)
    runs = compare(
        [Plan.load(path) for path in plan],
        TrainingConfig.load(config),
        local_device(),
        cluster=None if cluster is None else Cluster.load(cluster),
        emulation=emulation,
    )
    if runs is None:
        return
    names = [path.stem for path in plan]
    if len(set(names)) < len(names):
        names = [str(path) for path in plan]
    console = terminal()
    print_table(comparison_table(names, runs), console)
    for line in order_lines(names, runs):
        print_line(line, console)
