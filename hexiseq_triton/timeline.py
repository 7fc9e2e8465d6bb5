"""What a rank does when: named spans of time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

COMPUTE = "compute"
"""The stream on which a rank computes; spans of other streams count in no phase of a step."""


@dataclass(frozen=True)
class Span:
    """A named stretch of time on a stream: wall-clock start and length, in seconds."""

    name: str
    start_seconds: float
    seconds: float
    stream: str = COMPUTE

    @property
    def stop_seconds(self) -> float:
        return self.start_seconds + self.seconds


@dataclass(frozen=True)
class OpenSpan:
    """A span that has begun: when, or by which event."""

    name: str
    stream: str
    began: float | torch.cuda.Event


class Timeline:
    """Spans of one rank. Records nothing until `enabled`.

    On CUDA a span lies between two events of the current stream, so it shows the device's time;
    `stream` only names that stream.
    """

    def __init__(self, device: torch.device, *, enabled: bool = False) -> None:
        self.enabled = enabled
        self._cuda = device.type == "cuda"
        self._spans: list[Span] = []
        self._events: list[tuple[OpenSpan, torch.cuda.Event, torch.cuda.Event]] = []
        self._origin: tuple[float, torch.cuda.Event] | None = None

    @contextmanager
    def span(self, name: str, stream: str = COMPUTE) -> Iterator[None]:
        """Record what runs inside under `name`."""
        opened = self.start(name, stream)
        yield
        self.stop(opened)

    def start(self, name: str, stream: str = COMPUTE) -> OpenSpan | None:
        """Begin a span where `span` doesn't fit; give what this returns to `stop`."""
        if not self.enabled:
            return None
        return OpenSpan(name, stream, self._event() if self._cuda else time.time())

    def stop(self, opened: OpenSpan | None) -> None:
        """End a span."""
        if opened is None:
            return
        if isinstance(opened.began, float):
            seconds = time.time() - opened.began
            self._spans.append(Span(opened.name, opened.began, seconds, opened.stream))
        else:
            self._events.append((opened, opened.began, self._event()))

    def _event(self) -> torch.cuda.Event:
        if self._origin is None:
            origin = torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            origin.record()
            self._origin = (time.time(), origin)
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def spans(self) -> list[Span]:
        """Return all spans so far in order of their start; on CUDA waits for the device."""
        found = list(self._spans)
        if self._origin is not None:
            torch.cuda.synchronize()
            zero, origin = self._origin
            found += [
                Span(
                    opened.name,
                    zero + origin.elapsed_time(start) / 1e3,
                    start.elapsed_time(stop) / 1e3,
                    opened.stream,
                )
                for opened, start, stop in self._events
            ]
        return sorted(found, key=lambda span: (span.start_seconds, -span.seconds))

    def clear(self) -> None:
        """Forget all spans."""
        self._spans.clear()
        self._events.clear()
