"""What a run reports: one JSON line a step, and a progress bar."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step: its mean loss in nats, the tokens of all replicas, and its length."""

    step: int
    loss: float
    tokens: int
    seconds: float
    tokens_per_second: float


class Report:
    """Writes metrics to a file and to the screen; use as a context manager.

    Args:
        path: the JSON-lines file. Lines of steps that are done again are dropped, and what is no
            line of a step, as one that was cut off when a run died.
        start: steps done before.
        steps: steps in all.
        emulated: what every line says was emulated; "" for nothing.
    """

    def __init__(self, path: Path, *, start: int, steps: int, emulated: str = "") -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8", errors="replace") if start and path.exists() else ""
        kept = [line for line in text.splitlines() if _is_done(line, start)]
        path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")
        self._label = {"emulated": emulated} if emulated else {}
        self._progress = Progress(
            TextColumn(f"training, {emulated}" if emulated else "training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        self._task = self._progress.add_task("", total=steps, completed=start)

    def write(self, metrics: StepMetrics) -> None:
        """Add one step."""
        self._file.write(json.dumps(asdict(metrics) | self._label) + "\n")
        self._file.flush()
        text = f"loss {metrics.loss:.4f}  {metrics.tokens_per_second:,.0f} tokens/s"
        self._progress.update(self._task, advance=1, description=text)

    def __enter__(self) -> Report:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()
        self._file.close()


def _is_done(line: str, steps: int) -> bool:
    """Return whether a line is whole, and of one of the first `steps` steps."""
    try:
        return bool(json.loads(line)["step"] <= steps)
    except (ValueError, KeyError, TypeError):
        return False
