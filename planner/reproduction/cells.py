"""Cells: one experiment with one cluster, model and length, which is computed at once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path

from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.plans import ExchangePlan
from hexiseq_triton.planner.problem import Problem
from hexiseq_triton.planner.reproduction.experiments import Kind, Named, PaperFigure
from hexiseq_triton.planner.simulator import Mode
from hexiseq_triton.planner.workload import Workload

PLANNER = Path(__file__).parent.parent


@dataclass(frozen=True)
class Cell:
    """What one process computes at a time.

    `alike` is the cluster to hold against, for parity; `paper` the paper's figure for the cell;
    `passes` how many a step has, if they are not open.
    """

    experiment: str
    kind: Kind
    cluster: Cluster
    model: str
    seq_len: int
    global_batch: int
    modes: tuple[Mode, ...]
    baselines: tuple[str, ...]
    alike: Cluster | None = None
    paper: float | None = None
    passes: int | None = None

    @property
    def problem(self) -> Problem:
        return self.problem_on(self.cluster)

    def problem_on(self, cluster: Cluster) -> Problem:
        """Return the cell's model and workload on a cluster."""
        workload = Workload(self.seq_len, self.global_batch, self.passes)
        return Problem(cluster, ModelSpec.load(self.model), workload, ExchangePlan())

    @property
    def inputs(self) -> str:
        """A hash of all that the result depends on but the planner's code (`code_digest`)."""
        content = {
            "cell": [
                self.experiment,
                self.kind,
                self.seq_len,
                self.global_batch,
                self.passes,
                self.paper,
            ],
            "modes": self.modes,
            "baselines": self.baselines,
            "model": asdict(ModelSpec.load(self.model)),
            "clusters": [each.digest for each in (self.cluster, self.alike) if each is not None],
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def title(self) -> str:
        return f"{self.experiment}, {self.model}, {self.seq_len // 1024}K"


def cells_of(named: Named) -> Iterator[Cell]:
    """Yield the cells of an experiment: every cluster, model and length, then the sweep's."""
    experiment = named.experiment
    for name, cluster in named.clusters.items():
        for model, seq_len in product(experiment.models, experiment.seq_lens):
            yield Cell(
                f"{named.name}: {name}" if len(named.clusters) > 1 else named.name,
                experiment.kind,
                cluster,
                model,
                seq_len,
                experiment.global_batch,
                experiment.modes,
                experiment.baselines,
                named.alike,
                _figure(experiment.paper, model, seq_len, cluster),
            )
    if experiment.sweep is None:
        return
    for change, (cluster, passes) in named.swept.items():
        for model, seq_len in product(experiment.models, experiment.sweep.seq_lens):
            yield Cell(
                f"{named.name}: {change}",
                experiment.kind,
                cluster,
                model,
                seq_len,
                experiment.global_batch,
                experiment.modes[:1],
                experiment.baselines,
                named.alike,
                passes=passes,
            )


def _figure(
    figures: tuple[PaperFigure, ...], model: str, seq_len: int, cluster: Cluster
) -> float | None:
    for figure in figures:
        fits = (
            figure.model in (None, model),
            figure.seq_len in (None, seq_len),
            figure.gpus in (None, cluster.world_size),
            figure.statistic == "cell",
        )
        if all(fits):
            return figure.value
    return None


@cache
def code_digest() -> str:
    """Return a hash of the planner's sources and tables."""
    digest = hashlib.sha256()
    for path in sorted([*PLANNER.rglob("*.py"), *PLANNER.glob("*.yaml")]):
        digest.update(path.relative_to(PLANNER).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
