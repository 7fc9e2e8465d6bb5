"""`hexiseq doctor`: what each rank is and whether they can work together, in one table."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from hexiseq_triton.doctor.examine import Diagnosis

TIMEOUT = timedelta(minutes=3)


def doctor_command() -> None:
    """Check versions, links and kernels of all ranks under torchrun; exit code 1 if anything must
    be fixed."""
    from hexiseq_triton.devices import local_device
    from hexiseq_triton.environment import check_started_by_torchrun

    check_started_by_torchrun("--no-python hexiseq doctor ...")
    import torch
    import torch.distributed as dist

    from hexiseq_triton.doctor.examine import examine
    from hexiseq_triton.profiling.world import world

    with world(torch.device("cpu"), TIMEOUT):  # gloo works where NCCL may not
        found = examine(local_device())
        if dist.get_rank() == 0:
            print_diagnosis(found)
    if found.problems:
        raise typer.Exit(1)


def print_diagnosis(found: Diagnosis, console: Console | None = None) -> None:
    """Print the table, then problems and remarks, a line each."""
    from hexiseq_triton.reports.terminal import print_line, print_table, terminal
    from hexiseq_triton.wording import counted

    console = console or terminal()
    print_table(ranks_table(found), console)
    held = ", ".join(f"{name} {held}" for name, held in found.reports[0].versions.items())
    print_line(f"rank 0 has {held}", console)
    for kind, texts in (("fix", found.problems), ("note", found.remarks)):
        for text in texts:
            print_line(f"{kind}: {text}", console)
    if not found.problems:
        console.print(f"{counted(len(found.reports), 'rank')} can work together")


def ranks_table(found: Diagnosis) -> Table:
    """Return a table with a row a rank."""
    table = Table()
    for name in ("rank", "host", "device", "memory", "kernels", "peers", "network", "exchange ms"):
        table.add_column(name, justify="right" if name in ("rank", "memory") else "left")
    for report in found.reports:
        memory = f"{report.memory_bytes / 2**30:.1f} GiB" if report.memory_bytes else "-"
        peers = f"{len(report.peers)}/{report.local_gpus - 1}" if report.local_gpus > 1 else "-"
        network = ", ".join(
            part for part in (report.nccl.network, report.nccl.interface, report.nccl.ways) if part
        )
        table.add_row(
            str(report.rank),
            report.host,
            report.device,
            memory,
            f"{report.kernels.name} ({report.kernels.why})",
            peers,
            network or "-",
            " ".join(result.removeprefix("ok ") for result in report.smoke.values()) or "-",
        )
    return table
