"""Watch some steps of a run on every rank, then write and show what they consisted of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hexiseq_triton.context import ParallelContext
from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.timeline import Span
from hexiseq_triton.tracing.perfetto import write_trace
from hexiseq_triton.tracing.phases import Phases, measured_phases, visible_share
from hexiseq_triton.tracing.record import Forecast, RecordedRun

WARM_UP_STEPS = 2
"""Steps before the first observed one: they compile kernels and make the allocator's pools."""
OBSERVED_STEPS = 3


@dataclass(frozen=True)
class Seen:
    """What one rank saw."""

    spans: list[Span]
    phases: Phases
    visible_share: float
    device: str
    emulated: str
    paths: str


class Observer:
    """Records steps [first, last] of a run, counted from 1; made on every rank.

    Args:
        context: whose timeline records.
        forecast: what the plan predicts.
        steps: how many steps the run has left.
        done: steps done before.
        emulated: this rank's label, "" for nothing emulated.
    """

    def __init__(
        self,
        context: ParallelContext,
        forecast: Forecast,
        steps: int,
        done: int = 0,
        emulated: str = "",
    ) -> None:
        self.context = context
        self.forecast = forecast
        self.first = done + min(WARM_UP_STEPS + 1, steps)
        self.last = min(self.first + OBSERVED_STEPS - 1, done + steps)
        self.emulated = emulated
        self._shares: list[float] = []

    def before(self, step: int) -> None:
        """Say that `step` is about to begin."""
        if step == self.first:
            self.context.timeline.clear()
            self.context.timeline.enabled = True

    def batch(self, layout: BatchLayout) -> None:
        """Take note of a batch's documents."""
        if self.context.timeline.enabled:
            self._shares.append(visible_share(layout.document_lengths, self.context.plan.seq_len))

    def after(self, step: int) -> tuple[RecordedRun, list[list[Span]]] | None:
        """Return the recorded run and all ranks' spans on rank 0, once the last step is over.

        A collective call of all ranks.
        """
        if step != self.last:
            return None
        context = self.context
        context.timeline.enabled = False
        spans = context.timeline.spans()
        context.timeline.clear()
        works = any(
            share.rank == context.rank and (share.tokens or share.num_q_heads)
            for share in context.plan.shares
        )
        seen = Seen(
            spans,
            measured_phases(spans, works=works),
            sum(self._shares) / len(self._shares) if self._shares else 1.0,
            device_name(context.device),
            self.emulated,
            context.paths,
        )
        everyone: list[Any] = [None] * context.plan.world_size
        dist.all_gather_object(everyone, (context.rank, seen), group=context.world_group)
        if context.rank != 0:
            return None
        ordered: list[Seen] = [entry for _, entry in sorted(everyone, key=lambda pair: pair[0])]
        run = RecordedRun.of(
            context.plan,
            self.forecast,
            self.last - self.first + 1,
            [entry.phases for entry in ordered],
            [entry.device for entry in ordered],
            [entry.emulated for entry in ordered],
            [entry.paths for entry in ordered],
            [entry.visible_share for entry in ordered],
        )
        return run, [entry.spans for entry in ordered]


def save_trace(path: str | Path, run: RecordedRun, spans: list[list[Span]]) -> None:
    """Write the spans of all ranks; emulated ranks say so in their names."""
    write_trace(path, spans, run.emulated)


def device_name(device: torch.device) -> str:
    """Return what PyTorch calls a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
