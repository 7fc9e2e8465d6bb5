"""`hexiseq train`, `launch` and `demo`: run a plan."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from hexiseq_triton.commands.options import file_to_write, folder_to_write
from hexiseq_triton.launch import DEFAULT_PORT, node_commands, sbatch_file
from hexiseq_triton.planner.plans import Plan

PlanFile = Annotated[Path, typer.Option("--plan", help="plan file, from `hexiseq plan --out`")]
TrainingFile = Annotated[Path, typer.Option(help="training file (YAML); see examples/train.yaml")]
ClusterOption = Annotated[
    Path | None, typer.Option(help="the plan's cluster file: predicts each phase of a step")
]
EmulateSms = Annotated[
    str | None, typer.Option(help="for tests: multiprocessors of each rank: 132,132,44,44")
]
EmulateMemory = Annotated[
    str | None,
    typer.Option("--emulate-memory-gb", help="for tests: GB that each rank's tensors may take"),
]
EmulateLinks = Annotated[
    str | None,
    typer.Option("--emulate-link-gb-per-s", help="for tests: GB/s that each rank receives"),
]


def train_command(
    plan: PlanFile,
    config: TrainingFile,
    cluster: ClusterOption = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="write observed steps of all ranks, for Perfetto", callback=file_to_write
        ),
    ] = None,
    emulate_sms: EmulateSms = None,
    emulate_memory_gb: EmulateMemory = None,
    emulate_link_gb_per_s: EmulateLinks = None,
) -> None:
    """Train under a plan; started by torchrun, once a rank (see `hexiseq launch`)."""
    from hexiseq_triton.environment import check_started_by_torchrun

    files = shlex.join(("--plan", str(plan), "--config", str(config)))
    launch = f"hexiseq launch {files} --hosts localhost"
    check_started_by_torchrun("--no-python hexiseq train ...", f"print the command with `{launch}`")
    from hexiseq_triton.emulation.emulate import Emulation
    from hexiseq_triton.train import train

    emulation = Emulation.parse(emulate_sms, emulate_memory_gb, emulate_link_gb_per_s)
    train(plan, config, cluster=cluster, trace=trace, emulation=emulation)


def launch_command(
    plan: PlanFile,
    hosts: Annotated[str, typer.Option(help="a host for each node of the plan: a,b")],
    config: Annotated[Path, typer.Option(help="training file")] = Path("train.yaml"),
    port: Annotated[
        int, typer.Option(help="a free port of the first host", min=1, max=65535)
    ] = DEFAULT_PORT,
    sbatch: Annotated[
        Path | None, typer.Option(help="write a Slurm batch file here", callback=file_to_write)
    ] = None,
) -> None:
    """Print the torchrun line of each node, and a Slurm batch file."""
    program = ("hexiseq", "train", "--plan", str(plan), "--config", str(config))
    names = [host.strip() for host in hosts.split(",") if host.strip()]
    loaded = Plan.load(plan)
    loaded.check_executable()
    commands = node_commands(loaded, names, program, port=port)
    for command in commands:
        print(f"# on {command.host}\n{command.line}")
    if sbatch is None:
        print(f"\n# or, under Slurm, as a batch file\n{sbatch_file(commands)}", end="")
    else:
        sbatch.write_text(sbatch_file(commands), encoding="utf-8")


def demo_command(
    out: Annotated[
        Path, typer.Option(help="folder for plots, metrics, trace", callback=folder_to_write)
    ] = Path("demo_out"),
) -> None:
    """Plan 2 fast + 2 slow GPUs, train in four processes, and compare with one process."""
    from hexiseq_triton.demo import run_demo

    if not run_demo(out):
        raise typer.Exit(1)
