"""Runs cells side by side, and keeps what is done, so that a run can be taken up again."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from hexiseq_triton.errors import ConfigError
from hexiseq_triton.planner.reproduction.ablations import ablated
from hexiseq_triton.planner.reproduction.cells import Cell, code_digest
from hexiseq_triton.planner.reproduction.comparison import compared, held_against
from hexiseq_triton.planner.reproduction.experiments import Kind
from hexiseq_triton.planner.reproduction.optimality import against_all
from hexiseq_triton.planner.reproduction.planning import planning_time
from hexiseq_triton.planner.reproduction.rows import Row

_COMPUTED: dict[Kind, Callable[[Cell], list[Row]]] = {
    "comparison": compared,
    "parity": held_against,
    "planning_time": planning_time,
    "ablation": ablated,
    "optimality": against_all,
}


@dataclass(frozen=True)
class Result:
    """What a cell came to; `code` is of the planner's sources, `cpu_seconds` of its process."""

    inputs: str
    code: str
    cpu_seconds: float
    rows: tuple[Row, ...]


@dataclass
class Results:
    """The results in a file, one line each, added as they come."""

    path: Path
    by_inputs: dict[str, Result] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read the file; without one there are no results yet.

        Raises:
            ConfigError: if a line cannot be read; the last one may be cut short, and is left out.
        """
        results = cls(path)
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                result = _parsed(line)
            except (ValueError, KeyError, TypeError) as error:
                if number == len(lines):
                    break  # the run was ended while it wrote
                raise ConfigError(
                    f"{path}: line {number} is no result ({error}); remove the file to start anew"
                ) from error
            results.by_inputs[result.inputs] = result
        return results

    def add(self, result: Result) -> None:
        """Keep a result, in the file too; its floats are rounded as they are there."""
        line = _line(result)
        self.by_inputs[result.inputs] = _parsed(line)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)

    def of(self, cells: Iterable[Cell]) -> list[Result]:
        """Return the results of cells, in their order, those that are missing left out."""
        found = (self.by_inputs.get(cell.inputs) for cell in cells)
        return [result for result in found if result is not None]

    def forget(self, cells: Iterable[Cell]) -> None:
        """Let cells be computed again."""
        for cell in cells:
            self.by_inputs.pop(cell.inputs, None)

    def keep_only(self, cells: Iterable[Cell]) -> None:
        """Write the file anew with the results of these cells, in their order."""
        kept = self.of(cells)
        self.by_inputs = {result.inputs: result for result in kept}
        self.path.write_text("".join(map(_line, kept)), encoding="utf-8")


def compute(cells: Sequence[Cell], results: Results, jobs: int) -> Iterator[Cell]:
    """Compute the cells whose results are missing, and add those; yield each cell when it is known.

    Args:
        cells: to be computed.
        results: known ones.
        jobs: processes side by side. Planning is timed afterwards, with the machine to itself.
    """
    known = [cell for cell in cells if cell.inputs in results.by_inputs]
    missing = [cell for cell in cells if cell.inputs not in results.by_inputs]
    yield from known
    code = code_digest()
    timed = [cell for cell in missing if cell.kind == "planning_time"]
    others = [cell for cell in missing if cell.kind != "planning_time"]
    jobs = min(jobs, len(others))
    if jobs > 1:
        context = multiprocessing.get_context("spawn")  # the caller may have threads
        with ProcessPoolExecutor(jobs, context) as pool:
            running = {pool.submit(result_of, cell, code): cell for cell in others}
            for future in as_completed(running):
                results.add(future.result())
                yield running[future]
        others = []
    for cell in (*others, *timed):
        results.add(result_of(cell, code))
        yield cell


def result_of(cell: Cell, code: str) -> Result:
    """Compute one cell; `code` is of the planner's sources (`code_digest`)."""
    start = time.process_time()
    rows = _COMPUTED[cell.kind](cell)
    return Result(cell.inputs, code, time.process_time() - start, tuple(rows))


def _line(result: Result) -> str:
    content = {
        "inputs": result.inputs,
        "code": result.code,
        "cpu_seconds": round(result.cpu_seconds, 2),
        "rows": [row.content for row in result.rows],
    }
    return json.dumps(content) + "\n"


def _parsed(line: str) -> Result:
    content = json.loads(line)
    rows = tuple(Row(**row) for row in content["rows"])
    return Result(content["inputs"], content["code"], content["cpu_seconds"], rows)
