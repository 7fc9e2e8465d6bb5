"""What a rank does when: named spans, written as a Chrome/Perfetto trace."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Span:
    """A named stretch of time: wall-clock start and length, in seconds."""

    name: str
    start_seconds: float
    seconds: float


class Timeline:
    """Spans of one rank. Records nothing until `enabled`.

    On CUDA a span lies between two events of the current stream, so it shows the device's time.
    """

    def __init__(self, device: torch.device, *, enabled: bool = False) -> None:
        self.enabled = enabled
        self._cuda = device.type == "cuda"
        self._spans: list[Span] = []
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._origin: tuple[float, torch.cuda.Event] | None = None

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record what runs inside under `name`."""
        if not self.enabled:
            yield
        elif self._cuda:
            start = self._record()
            yield
            self._events.append((name, start, self._record()))
        else:
            began = time.time()
            yield
            self._spans.append(Span(name, began, time.time() - began))

    def _record(self) -> torch.cuda.Event:
        if self._origin is None:
            origin = torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            origin.record()
            self._origin = (time.time(), origin)
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def spans(self) -> list[Span]:
        """Return all spans so far; on CUDA waits for the device."""
        if self._origin is None:
            return list(self._spans)
        torch.cuda.synchronize()
        zero, origin = self._origin
        return [
            Span(name, zero + origin.elapsed_time(start) / 1e3, start.elapsed_time(stop) / 1e3)
            for name, start, stop in self._events
        ]


def write_trace(path: str | Path, spans_of_rank: Sequence[Sequence[Span]]) -> None:
    """Write the spans of all ranks as a Chrome trace, one row a rank (open it in Perfetto)."""
    zero = min((s.start_seconds for spans in spans_of_rank for s in spans), default=0.0)
    events: list[dict[str, object]] = []
    for rank, spans in enumerate(spans_of_rank):
        name = {"name": f"rank {rank}"}
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": name})
        events += [
            {
                "ph": "X",
                "name": span.name,
                "pid": rank,
                "tid": 0,
                "ts": (span.start_seconds - zero) * 1e6,
                "dur": span.seconds * 1e6,
            }
            for span in spans
        ]
    Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
