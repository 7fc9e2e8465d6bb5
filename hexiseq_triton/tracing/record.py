"""A recorded run: what each rank's step consisted of, beside what was predicted; one JSON file.

The format is described in docs/recorded-runs.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from pydantic.dataclasses import dataclass as checked_dataclass

from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.explain import check_made_for, cost_of, workload_of
from hexiseq_triton.planner.files import FILE_CONFIG, build, read_mapping
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.plans import Plan
from hexiseq_triton.planner.write import noun_digest
from hexiseq_triton.tracing.phases import Phases, predicted_phases

VERSION: Literal[1] = 1


@dataclass(frozen=True)
class Forecast:
    """What a plan predicts of a step: its seconds, each rank's own work, and each rank's phases.

    Plan files hold the first two; phases need the cluster file. Of another model than its own a
    plan predicts nothing.
    """

    step_seconds: float | None = None
    computing: tuple[float | None, ...] = ()
    phases: tuple[Phases, ...] = ()

    @classmethod
    def of(cls, plan: Plan, cluster: Cluster | None, model: ModelSpec) -> Forecast:
        """Return a plan's forecast; of its phases too if the cluster is given.

        Raises:
            PlanError: if the cluster is given, and the plan was made for another one or model.
        """
        busy: list[float | None] = [None] * plan.world_size
        if cluster is None and is_of_another_model(plan, model):
            return cls(None, tuple(busy))
        for share in plan.shares:
            busy[share.rank] = share.seconds
        if cluster is None:
            step = None if plan.predicted is None else plan.predicted.step_seconds
            return cls(step, tuple(busy))
        check_made_for(plan, cluster, model)
        cost = cost_of(plan, cluster, model, workload_of(plan))
        return cls(cost.step_seconds, tuple(cost.busy_seconds), tuple(predicted_phases(cost)))


def is_of_another_model(plan: Plan, model: ModelSpec) -> bool:
    """Return whether a plan says that it was made for another model."""
    return plan.made_from.get("model") not in (None, noun_digest(model))


@checked_dataclass(frozen=True, config=FILE_CONFIG)
class RecordedRun:
    """Steps of one plan, measured; seconds of one step on average, by rank.

    `emulated` says of each rank what was emulated, "" for nothing; `paths` how its all-to-alls and
    keys travel. `visible_share` is, by rank, the (query, key) pairs of the batches as a share of
    those of whole sequences.
    """

    plan: str
    strategy: str
    world_size: int
    seq_len: int
    global_batch: int
    devices: tuple[str, ...]
    emulated: tuple[str, ...]
    paths: tuple[str, ...]
    steps: int
    step_seconds: float
    measured: tuple[Phases, ...]
    visible_share: tuple[float, ...]
    predicted_step_seconds: float | None = None
    predicted_computing: tuple[float | None, ...] = ()
    predicted: tuple[Phases, ...] = field(default=())
    version: Literal[1] = VERSION

    @classmethod
    def of(
        cls,
        plan: Plan,
        forecast: Forecast,
        steps: int,
        measured: Sequence[Phases],
        devices: Sequence[str],
        emulated: Sequence[str],
        paths: Sequence[str],
        visible_share: Sequence[float],
    ) -> RecordedRun:
        """Put together what the ranks measured."""
        return cls(
            plan=plan.digest,
            strategy=plan.strategy,
            world_size=plan.world_size,
            seq_len=plan.seq_len,
            global_batch=plan.global_batch,
            devices=tuple(devices),
            emulated=tuple(emulated),
            paths=tuple(paths),
            steps=steps,
            step_seconds=max(sum(phases.values()) for phases in measured),
            measured=tuple(measured),
            visible_share=tuple(visible_share),
            predicted_step_seconds=forecast.step_seconds,
            predicted_computing=forecast.computing,
            predicted=forecast.phases,
        )

    @property
    def as_planned(self) -> bool:
        """Whether the batches were whole sequences, as plans count them."""
        return all(abs(share - 1.0) < 0.01 for share in self.visible_share)

    def save(self, path: str | Path) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> RecordedRun:
        """Read a recorded run.

        Raises:
            ConfigError: if the file cannot be read or a field is wrong.
        """
        return build(cls, read_mapping(path), str(path))
