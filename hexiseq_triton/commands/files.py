"""`hexiseq gpus`, `schema` and `import`: what stands in the planner's files, and where from."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.table import Table

from hexiseq_triton.errors import ConfigError
from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.files import read_text
from hexiseq_triton.planner.gpus import Figure, GpuSpec, gpu_overlay, gpu_table, nearest
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.schema import FILES, json_schema
from hexiseq_triton.planner.topology import listed_gpus, node_entry, read_topology
from hexiseq_triton.reports.terminal import print_table, terminal

GpuFileOption = Annotated[
    Path | None, typer.Option("--gpus", help="a file of GPUs to lay over the table")
]

import_app = typer.Typer(help="Turn what other programs print into the planner's files.")


def gpus_command(
    name: Annotated[str | None, typer.Argument(help="one GPU: every figure and its source")] = None,
    gpus: GpuFileOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """List the GPUs that cluster files can name."""
    table = gpu_table() | (gpu_overlay(gpus) if gpus else {})
    if name is not None and name not in table:
        raise ConfigError(f"{name!r} is no known GPU; near it: {nearest(name, table)}")
    shown = table if name is None else {name: table[name]}
    if as_json:
        print(json.dumps({name: asdict(gpu) for name, gpu in shown.items()}, indent=1))
    elif name is None:
        print_table(_gpu_list(shown), terminal())
    else:
        print_table(_gpu_figures(name, shown[name]), terminal())


def _gpu_list(gpus: dict[str, GpuSpec]) -> Table:
    """Return one row a GPU; an assumed figure has a question mark."""
    why = [f"{name} cannot run: {gpu.reason}" for name, gpu in gpus.items() if not gpu.runnable]
    about = "? assumed; dense bf16; links one way; `hexiseq gpus NAME` has the sources"
    table = Table(caption="\n".join([about, *why]))
    table.add_column("GPU", no_wrap=True)
    for name in ("TFLOP/s", "GB", "GB/s", "NVLink", "PCIe", "network"):
        table.add_column(name, justify="right")
    table.add_column("runs")
    for name, gpu in gpus.items():
        figures = (
            gpu.dense_tflops,
            gpu.memory_gb,
            gpu.memory_gb_per_s,
            gpu.nvlink_gb_per_s,
            gpu.pcie_gb_per_s,
            gpu.network_gb_per_s,
        )
        table.add_row(name, *map(_marked, figures), "yes" if gpu.runnable else "no")
    return table


def _marked(figure: Figure | None) -> str:
    if figure is None:
        return "-"
    return f"{figure.value:g}{'?' if figure.origin == 'assumed' else ''}"


def _gpu_figures(name: str, gpu: GpuSpec) -> Table:
    """Return one row a figure."""
    table = Table(title=name if gpu.runnable else f"{name}: cannot run, {gpu.reason}")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column("origin")
    table.add_column("source")
    for field, figure in gpu.figures():
        table.add_row(field, f"{figure.value:g}", figure.origin, figure.source)
    return table


def schema_command(
    file: Annotated[str, typer.Argument(help=", ".join((*FILES, "training")))],
) -> None:
    """Print the JSON schema of a file."""
    kinds = dict(FILES)
    if file == "training":
        from hexiseq_triton.training_config import TrainingConfig

        kinds["training"] = TrainingConfig
    if file not in kinds:
        raise ConfigError(f"{file!r} is no file here; one of {', '.join((*FILES, 'training'))}")
    print(json.dumps(json_schema(kinds[file], file), indent=1, sort_keys=True))


@import_app.command("topo")
def import_topology(
    file: Annotated[Path, typer.Argument(help="what `nvidia-smi topo -m` printed")],
    gpu: Annotated[
        str | None, typer.Option(help="model of all its GPUs, from `hexiseq gpus`")
    ] = None,
    listing: Annotated[
        Path | None, typer.Option("--list", help="what `nvidia-smi -L` printed: the models")
    ] = None,
    name: Annotated[str, typer.Option(help="name of the node")] = "node",
    count: Annotated[int, typer.Option(help="nodes like this one")] = 1,
    nic_gb_per_s: Annotated[
        float | None, typer.Option(help="what one NIC sends, GB/s one way")
    ] = None,
    gpus: GpuFileOption = None,
) -> None:
    """Print a cluster file of the host that `nvidia-smi topo -m` describes."""
    topology = read_topology(read_text(file), str(file))
    if (gpu is None) == (listing is None):
        raise ConfigError("give the model of the GPUs: either --gpu NAME, or --list FILE")
    if nic_gb_per_s is not None and not nic_gb_per_s > 0:
        raise ConfigError(f"--nic-gb-per-s is {nic_gb_per_s:g}; it is above 0")
    if listing is not None:
        models = listed_gpus(read_text(listing), str(listing))
    else:
        models = [str(gpu)] * len(topology.gpus)
    overlay = gpu_overlay(gpus) if gpus else {}
    entry, notes = node_entry(topology, models, gpu_table() | overlay, nic_gb_per_s)
    content: dict[str, Any] = {"nodes": [{"name": name, "count": count} | entry]}
    Cluster.from_mapping(content, "the imported cluster", overlay)
    for note in notes:
        print(f"# {note}")
    print(yaml.safe_dump(content, sort_keys=False, default_flow_style=None), end="")


@import_app.command("model")
def import_model(
    file: Annotated[Path, typer.Argument(help="a Hugging Face config.json")],
) -> None:
    """Print a model file of the shape that a Hugging Face configuration describes."""
    print(yaml.safe_dump(asdict(ModelSpec.load(file)), sort_keys=False), end="")
