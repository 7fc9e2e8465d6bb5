"""Write spans of all ranks as a Chrome trace: a process a rank, a thread a stream (Perfetto)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from hexiseq_triton.timeline import COMPUTE, Span


def write_trace(
    path: str | Path, spans_of_rank: Sequence[Sequence[Span]], labels: Sequence[str] = ()
) -> None:
    """Write the spans of all ranks; open the file in Perfetto or chrome://tracing.

    Args:
        path: the JSON file.
        spans_of_rank: of each rank; clocks of one host agree, those of several as NTP keeps them.
        labels: what to add to each rank's name; nothing if left out.
    """
    zero = min((s.start_seconds for spans in spans_of_rank for s in spans), default=0.0)
    events: list[dict[str, object]] = []
    for rank, spans in enumerate(spans_of_rank):
        label = f" ({labels[rank]})" if labels and labels[rank] else ""
        events += _events(rank, f"rank {rank}{label}", spans, zero)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


def _events(
    rank: int, name: str, spans: Sequence[Span], zero: float
) -> Iterator[dict[str, object]]:
    streams = sorted({span.stream for span in spans} | {COMPUTE}, key=lambda s: (s != COMPUTE, s))
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}}
    for thread, stream in enumerate(streams):
        named = {"name": stream}
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": named}
    for span in spans:
        yield {
            "ph": "X",
            "name": span.name,
            "pid": rank,
            "tid": streams.index(span.stream),
            "ts": (span.start_seconds - zero) * 1e6,
            "dur": span.seconds * 1e6,
        }
