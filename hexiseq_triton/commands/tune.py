"""`hexiseq tune`: measure this card's launch tables and write them where the kernels look."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress
from rich.table import Table

from hexiseq_triton.commands.options import file_to_make
from hexiseq_triton.errors import ConfigError
from hexiseq_triton.reports.terminal import print_line, print_table, terminal

if TYPE_CHECKING:
    from hexiseq_triton.kernels.configs import Config
    from hexiseq_triton.kernels.tune import Choice


def tune_command(
    quick: Annotated[
        bool, typer.Option("--quick", help="head dimension 128 only, few candidates")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="write here, and not where the kernels look", callback=file_to_make),
    ] = None,
) -> None:
    """Measure which launch choices are fastest on this GPU, a few minutes, and keep them."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            "hexiseq tune measures kernels on an NVIDIA GPU; PyTorch finds none here: "
            "run it on a machine of the cluster, once for each model of card"
        )
    from hexiseq_triton.kernels import tune
    from hexiseq_triton.kernels.user_tables import Card, load_sections, save_section, table_path

    path = out or table_path()
    if path.exists():
        load_sections(path)  # another file is refused before minutes of measuring
    console = terminal()
    device = torch.device("cuda", torch.cuda.current_device())
    card, size = Card.of(device), tune.QUICK if quick else tune.FULL
    tasks = tune.tasks_for(card, size, device)
    choices = []
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(tasks))
        for choice in tune.tune(tasks, size, device, tune.event_clock):
            choices.append(choice)
            done = f"{choice.task.table}, head dimension {choice.task.head_dim}"
            progress.update(bar, advance=1, description=done)
    save_section(tune.section_of(card, choices), path)
    print_table(choice_table(card.name, choices), console)
    print_line(f"written to {path}", console)


def choice_table(card: str, choices: Sequence[Choice]) -> Table:
    """Return a table with one row a kernel and head dimension."""
    table = Table(title=f"launch choices of {card}")
    for name in ("kernel", "head dim", "choice", "ms", "before, ms", "ran"):
        table.add_column(name, justify="left" if name in ("kernel", "choice") else "right")
    for choice in choices:
        before = choice.milliseconds_before
        table.add_row(
            choice.task.table,
            str(choice.task.head_dim),
            _shown(choice.config),
            f"{choice.milliseconds:.3f}",
            "does not run" if before is None else f"{before:.3f}",
            f"{len(choice.medians)} of {len(choice.task.candidates)}",
        )
    return table


def _shown(config: Config) -> str:
    loader = ", descriptors" if config.descriptors else ""
    blocks = f"{config.block_m}x{config.block_n}"
    return f"{blocks}, {config.num_warps} warps, {config.num_stages} stages{loader}"
