"""Experiments as data: a YAML file each in bench/experiments, and the file's name is theirs.

For instance S9.yaml:

    title: 64 GPUs of two models
    kind: comparison
    ours: the counts of each model, which the paper does not give
    clusters:
      48 H100 + 16 L40S:                                  # the content of a cluster file
        inter_gb_per_s: 25
        nodes:
          - {name: h100, count: 6, gpus: {H100-SXM: 8}}
          - {name: l40s, count: 2, gpus: {L40S: 8}}
    models: [13b, 70b]
    seq_lens: [131072, 262144]
    modes: [direct, lockstep]
    paper:
      - {value: 1.72, model: 70b, seq_len: 262144, source: its table 3}

Each cluster, model and length is a cell. What is done with it says the kind:

    comparison      ours against baselines on the same GPUs
    parity          ours against baselines on the GPUs of `alike`
    planning_time   `plan` by the clock
    ablation        ours with one freedom less at a time
    optimality      search and descent against all layouts of a grid
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from hexiseq_triton.errors import ConfigError
from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.files import FILE_CONFIG, Count, Positive, build, read_mapping
from hexiseq_triton.planner.gpus import Figure, nearest
from hexiseq_triton.planner.layouts import BASELINES
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.simulator import Mode

Kind = Literal["comparison", "parity", "planning_time", "ablation", "optimality"]
ClusterContent = dict[str, Any]
"""What a cluster file holds; checked by `Cluster.from_mapping`."""


@dataclass(frozen=True, config=FILE_CONFIG)
class PaperFigure:
    """A figure of the paper, of cells of a model, length and number of GPUs, or of all of them.

    `statistic` "mean" and "max" are over the experiment's group.
    """

    value: Positive
    source: str
    statistic: Literal["cell", "mean", "max"] = "cell"
    model: str | None = None
    seq_len: Count | None = None
    gpus: Count | None = None


@dataclass(frozen=True, config=FILE_CONFIG)
class Sweep:
    """The experiment with one thing changed at a time.

    `clusters` are others than the first; `rates` are factors on the peak of one of its GPU models;
    `passes` are how many a step must have: with as many as sequences, every sequence is on all GPUs
    at work.
    """

    seq_lens: tuple[Count, ...]
    clusters: dict[str, ClusterContent] = Field(default_factory=dict)
    rates: dict[str, tuple[Positive, ...]] = Field(default_factory=dict)
    passes: tuple[Count, ...] = ()


@dataclass(frozen=True, config=FILE_CONFIG)
class Experiment:
    """The content of an experiment's file.

    Attributes:
        title: one line.
        kind: what is done with each cluster, model and length.
        clusters: by name.
        models: presets of `models.yaml`.
        seq_lens: tokens of a sequence.
        ours: what of this the paper does not give.
        global_batch: sequences in a step.
        modes: exchanges to simulate; the first is the runtime's.
        baselines: the paper's set.
        paper: its figures.
        group: experiments of one group are averaged together; None is in no mean.
        remark: what the page should say where the group's means stand beside the paper's.
        alike: for `parity`, the cluster whose best baseline is held against.
        sweep: further cells, simulated in the first mode only.
    """

    title: str
    kind: Kind
    clusters: Annotated[dict[str, ClusterContent], Field(min_length=1)]
    models: Annotated[tuple[str, ...], Field(min_length=1)]
    seq_lens: Annotated[tuple[Count, ...], Field(min_length=1)]
    ours: str
    global_batch: Count = 8
    modes: Annotated[tuple[Mode, ...], Field(min_length=1)] = ("direct",)
    baselines: tuple[str, ...] = ("ring", "zigzag_ring", "ulysses", "usp")
    paper: tuple[PaperFigure, ...] = ()
    group: str | None = None
    remark: str | None = None
    alike: ClusterContent | None = None
    sweep: Sweep | None = None

    def __post_init__(self) -> None:
        if (self.alike is not None) != (self.kind == "parity"):
            raise ValueError(
                "kind parity needs `alike`, a cluster to hold against; no other has it"
            )
        unknown = [name for name in self.baselines if name not in BASELINES]
        if unknown or not self.baselines:
            raise ValueError(
                f"baselines are {', '.join(self.baselines) or 'none'}; known are "
                f"{', '.join(BASELINES)}"
            )


@dataclass(frozen=True)
class Named:
    """An experiment with the name of its file."""

    name: str
    experiment: Experiment
    source: str

    @cached_property
    def clusters(self) -> dict[str, Cluster]:
        """Its clusters by name, those of the sweep left out."""
        return {
            name: Cluster.from_mapping(content, f"{self.source}: clusters.{name}")
            for name, content in self.experiment.clusters.items()
        }

    @cached_property
    def alike(self) -> Cluster | None:
        content = self.experiment.alike
        return None if content is None else Cluster.from_mapping(content, f"{self.source}: alike")

    @cached_property
    def swept(self) -> dict[str, tuple[Cluster, int | None]]:
        """Clusters and numbers of passes of the sweep, by what is changed."""
        sweep = self.experiment.sweep
        if sweep is None:
            return {}
        first = next(iter(self.clusters.values()))
        found = {
            name: Cluster.from_mapping(content, f"{self.source}: sweep.clusters.{name}")
            for name, content in sweep.clusters.items()
        }
        for gpu, factors in sweep.rates.items():
            if gpu not in first.gpus:
                raise ConfigError(
                    f"{self.source}: sweep.rates names {gpu!r}; the first cluster has "
                    f"{', '.join(first.gpus)}"
                )
            found |= {f"{gpu} {f - 1:+.0%}": scaled(first, gpu, f) for f in factors}
        batch = self.experiment.global_batch
        for passes in sweep.passes:
            if batch % passes:
                raise ConfigError(
                    f"{self.source}: sweep.passes is {passes}; it must divide global_batch {batch}"
                )
        changed: dict[str, tuple[Cluster, int | None]] = {
            name: (cluster, None) for name, cluster in found.items()
        }
        return changed | {f"{passes} passes": (first, passes) for passes in sweep.passes}


def scaled(cluster: Cluster, gpu: str, factor: float) -> Cluster:
    """Return the cluster with all rates of computing of one GPU model times a factor."""
    spec = cluster.gpus[gpu]
    peak = Figure(spec.dense_tflops.value * factor, "assumed", f"{factor:g} times the table's")
    return replace(cluster, gpus=cluster.gpus | {gpu: replace(spec, dense_tflops=peak)})


def load_experiments(folder: str | Path, only: Iterable[str] = ()) -> list[Named]:
    """Read the experiments of a folder, in the order of their names.

    Args:
        folder: with one YAML file for each.
        only: names to keep; all if empty.

    Raises:
        ConfigError: if the folder has none, a name is unknown, or a file is wrong.
    """
    paths = {path.stem: path for path in sorted(Path(folder).glob("*.yaml"))}
    if not paths:
        raise ConfigError(
            f"{folder}: holds no experiments (*.yaml); run in a checkout of the repository, or "
            "name its bench/experiments with --experiments"
        )
    wanted = list(only) or list(paths)
    for name in wanted:
        if name not in paths:
            raise ConfigError(f"there is no experiment {name!r}; near it: {nearest(name, paths)}")
    return [_loaded(path) for name, path in paths.items() if name in wanted]


def _loaded(path: Path) -> Named:
    named = Named(path.stem, build(Experiment, read_mapping(path), str(path)), str(path))
    for model in named.experiment.models:
        try:
            ModelSpec.load(model)
        except ConfigError as error:
            raise ConfigError(f"{path}: models: {error}") from error
    _ = named.clusters, named.alike, named.swept  # wrong clusters are found before anything runs
    return named
