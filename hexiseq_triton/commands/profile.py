"""`hexiseq profile`: measure the cluster this runs on, and write its cluster file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from hexiseq_triton.commands.options import file_to_write
from hexiseq_triton.commands.train import EmulateLinks, EmulateMemory, EmulateSms
from hexiseq_triton.errors import ConfigError
from hexiseq_triton.wording import span

if TYPE_CHECKING:
    from hexiseq_triton.profiling.profile import ClusterProfile, Step

TIMEOUT = timedelta(minutes=5)


def profile_command(
    out: Annotated[
        Path, typer.Option(help="write the cluster file here", callback=file_to_write)
    ] = Path("cluster.yaml"),
    model: Annotated[
        str, typer.Option(help="preset or file: the layer that is measured")
    ] = "llama3-8b",
    head_dims: Annotated[
        str | None,
        typer.Option(help="head dimensions of attention: 64,128; the model's if left out"),
    ] = None,
    emulate_sms: EmulateSms = None,
    emulate_memory_gb: EmulateMemory = None,
    emulate_link_gb_per_s: EmulateLinks = None,
) -> None:
    """Measure every GPU and link under torchrun, in about a minute, for `hexiseq plan --cluster`.

    On a CPU a large model takes longer; a rehearsal has `--model tiny`.
    """
    from hexiseq_triton.devices import local_device
    from hexiseq_triton.environment import check_started_by_torchrun

    check_started_by_torchrun("--no-python hexiseq profile ...")
    import torch.distributed as dist

    from hexiseq_triton.emulation.emulate import Emulation, emulated
    from hexiseq_triton.planner.models import ModelSpec
    from hexiseq_triton.profiling.cluster_file import cluster_yaml
    from hexiseq_triton.profiling.profile import CPU_SIZES, GPU_SIZES, num_steps, profile
    from hexiseq_triton.profiling.world import world

    emulation = Emulation.parse(emulate_sms, emulate_memory_gb, emulate_link_gb_per_s)
    device = local_device()
    sizes = GPU_SIZES if device.type == "cuda" else CPU_SIZES
    dims = _head_dims(head_dims) or [ModelSpec.load(model).head_dim]
    with world(device, TIMEOUT):
        rank, size = dist.get_rank(), dist.get_world_size()
        with (
            emulated(emulation, rank, size, device) as label,
            _progress(num_steps(sizes, dims, size), shown=rank == 0) as step,
        ):
            found = profile(
                device,
                model,
                dims,
                sizes,
                emulated=label,
                emulation=emulation,
                step=step,
            )
        if rank == 0:
            out.write_text(cluster_yaml(found), encoding="utf-8")
            _print(found, out)


def _head_dims(text: str | None) -> list[int]:
    if text is None:
        return []
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--head-dims is {text!r}; it is numbers with commas between") from error
    if not all(8 <= dim <= 256 for dim in found):
        raise ConfigError(f"--head-dims is {text!r}; the kernels take 8 to 256")
    return found


@contextmanager
def _progress(total: int, *, shown: bool) -> Iterator[Step]:
    """Show how far the measuring is; yields what is told of each measurement."""
    columns = (TextColumn("profiling"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TextColumn("{task.description}"), disable=not shown) as bar:
        task = bar.add_task("", total=total)

        def step(name: str) -> None:
            bar.update(task, advance=1, description=name)

        yield step


def _print(found: ClusterProfile, out: Path) -> None:
    from hexiseq_triton.profiling.cluster_file import measured_lines
    from hexiseq_triton.reports.terminal import print_line, print_table, terminal

    console = terminal()
    print_table(rates_table(found), console)
    lines = [*found.lines, *_link_lines(found), *measured_lines(found)]
    for line in (*lines, f"measured in {found.seconds:.0f} s; written to {out}"):
        print_line(line, console)


def rates_table(found: ClusterProfile) -> Table:
    """Return measured TFLOP/s, a row a kind of work and size, a column a GPU model."""
    table = Table(title="TFLOP/s measured")
    table.add_column("work")
    table.add_column("tokens", justify="right")
    for each in found.classes:
        ranks = ", ".join(map(str, each.ranks))
        table.add_column(f"{each.name}\nrank {ranks}", justify="right")
    for i, rate in enumerate(found.classes[0].rates):
        head = "" if rate.head_dim is None else f", head dim {rate.head_dim}"
        cells = (f"{each.rates[i].flops_per_s / 1e12:.4g}" for each in found.classes)
        table.add_row(f"{rate.work}{head}", str(rate.tokens), *cells)
    memory = (f"{each.memory_bytes / 1e9:.1f}" for each in found.classes)
    table.add_row("memory, GB", "", *memory)
    return table


def _link_lines(found: ClusterProfile) -> Iterator[str]:
    for where, in_node in (("in a node", True), ("across nodes", False)):
        links = [found.link(rank, in_node=in_node) for rank in range(len(found.hosts))]
        rates = [link.bytes_per_s / 1e9 for link in links if link is not None]
        if rates:
            latency = max(link.latency_seconds for link in links if link is not None)
            yield (
                f"links {where}: {span(min(rates), max(rates), '.3g')} GB/s each way at once, "
                f"latency up to {latency * 1e6:.3g} us"
            )
