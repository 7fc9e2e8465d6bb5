"""Measure which launch choices are the fastest on the present card.

Each kernel at each head dimension is a task with a short list of candidates: the present choice,
what the built-in tables hold for other cards, and some more. Candidates that do not fit the card or
that spill registers drop out. The others run in turns, so that a card that slows down slows all
alike, and the least median wins, if it beats the present choice by more than noise.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from triton.errors import TritonError

from hexiseq_triton.errors import HexiSeqError
from hexiseq_triton.kernels.configs import Config, Table
from hexiseq_triton.kernels.launch_tables import (
    FORWARD,
    GRAD_KV,
    GRAD_Q,
    config_for,
)
from hexiseq_triton.kernels.tune_problem import Problem
from hexiseq_triton.kernels.user_tables import Card, Entry, HeadDim, Section, TableName

HEAD_DIMS: tuple[HeadDim, ...] = (64, 128, 256)
TABLES: dict[TableName, Table] = {
    "forward": FORWARD,
    "grad_kv": GRAD_KV,
    "grad_q": GRAD_Q,
}
NOISE = 0.01  # of a time: who wins by less does not replace the present choice
LEAST_ROUNDS = 5

# block_m, block_n, num_warps, num_stages, besides what the built-in tables hold
_MORE: dict[tuple[TableName, HeadDim], tuple[tuple[int, int, int, int], ...]] = {
    ("forward", 64): ((128, 64, 4, 3), (64, 64, 4, 3), (64, 128, 4, 2)),
    ("forward", 128): ((64, 64, 4, 2), (128, 64, 8, 2), (128, 128, 8, 2), (128, 32, 4, 3)),
    ("forward", 256): ((64, 64, 8, 2), (64, 32, 4, 2), (128, 32, 8, 2)),
    ("grad_kv", 64): ((64, 64, 4, 2), (64, 128, 8, 2), (32, 128, 8, 2)),
    ("grad_kv", 128): ((64, 64, 8, 2), (64, 128, 8, 2), (32, 128, 8, 2)),
    ("grad_kv", 256): ((32, 64, 8, 2), (32, 32, 4, 1)),
    ("grad_q", 64): ((64, 64, 4, 2), (128, 64, 4, 2), (128, 128, 8, 2)),
    ("grad_q", 128): ((64, 32, 4, 3), (128, 64, 8, 2), (64, 64, 4, 3)),
    ("grad_q", 256): ((64, 32, 4, 2), (64, 64, 8, 1)),
}

Launch = Callable[[], None]
Clock = Callable[[Launch], float]
"""Run a launch and return the milliseconds it took."""


@dataclass(frozen=True)
class Size:
    """What to run, and for how long."""

    num_tokens: int
    seconds: float
    head_dims: tuple[HeadDim, ...] = HEAD_DIMS
    most_candidates: int | None = None


FULL = Size(16384, 1.5)
QUICK = Size(4096, 0.5, (128,), 3)


@dataclass(frozen=True)
class Task:
    """One kernel at one head dimension; the first candidate is the present choice."""

    table: TableName
    head_dim: HeadDim
    candidates: tuple[Config, ...]


@dataclass(frozen=True)
class Choice:
    """The outcome of a task; `medians` are the milliseconds of the candidates that ran."""

    task: Task
    config: Config
    medians: Mapping[Config, float]

    @property
    def milliseconds(self) -> float:
        return self.medians[self.config]

    @property
    def milliseconds_before(self) -> float | None:
        """What the present choice took; None if it does not run on this card."""
        return self.medians.get(self.task.candidates[0])


def tasks_for(card: Card, size: Size, device: torch.device) -> list[Task]:
    """Return what to measure on a card."""
    tasks = []
    for head_dim in size.head_dims:
        like = torch.empty(0, 1, head_dim, dtype=torch.bfloat16, device=device)
        for name, table in TABLES.items():
            found = candidates(name, head_dim, card, config_for(table, like))
            tasks.append(Task(name, head_dim, found[: size.most_candidates]))
    return tasks


def candidates(
    name: TableName, head_dim: HeadDim, card: Card, present: Config
) -> tuple[Config, ...]:
    """Return the choices to try, without repeats, the present one first."""
    built_in = [config for (_, d), config in TABLES[name].items() if d == head_dim]
    more = [Config(*numbers) for numbers in _MORE[name, head_dim]]
    fitted = [replace(config, descriptors=card.has_descriptors) for config in (*built_in, *more)]
    return tuple(dict.fromkeys((present, *fitted)))


def tune(tasks: Sequence[Task], size: Size, device: torch.device, clock: Clock) -> Iterator[Choice]:
    """Yield the outcome of each task, as they stand: tasks of one head dimension together."""
    problem: Problem | None = None
    for task in tasks:
        if problem is None or problem.q.shape[2] != task.head_dim:
            problem = Problem(task.head_dim, size.num_tokens, device)
        launches = dict(_launches(task, problem))
        yield choose(task, medians(launches, clock, size.seconds))


def _launches(task: Task, problem: Problem) -> Iterator[tuple[Config, Launch]]:
    """Compile the candidates; yield those that run and do not spill, and the present choice."""
    for config in task.candidates:
        launch, run = problem.prepare(task.table, config)
        try:
            run()
        except TritonError:  # above all too much shared memory for this card
            continue
        if not launch.num_spills or config == task.candidates[0]:
            yield config, run


def medians(launches: Mapping[Config, Launch], clock: Clock, seconds: float) -> dict[Config, float]:
    """Run the launches in turns for about so many seconds; return the median milliseconds."""
    times: dict[Config, list[float]] = {config: [] for config in launches}
    end = time.perf_counter() + seconds
    rounds = 0
    while launches and (rounds < LEAST_ROUNDS or time.perf_counter() < end):
        for config, launch in launches.items():
            times[config].append(clock(launch))
        rounds += 1
    return {config: statistics.median(each) for config, each in times.items()}


def choose(task: Task, measured: Mapping[Config, float]) -> Choice:
    """Return the fastest; the present choice, where it runs, unless it loses by more than noise.

    Raises:
        HexiSeqError: if no candidate runs on the card.
    """
    if not measured:
        raise HexiSeqError(
            f"{task.table}, head dimension {task.head_dim}: none of {len(task.candidates)} "
            "launch choices runs on this card"
        )
    present = task.candidates[0]
    best = min(measured, key=lambda config: measured[config])
    if present in measured and measured[best] >= (1.0 - NOISE) * measured[present]:
        best = present
    return Choice(task, best, measured)


def section_of(card: Card, choices: Sequence[Choice]) -> Section:
    """Return the choices as a section of a user's launch tables."""
    tables: dict[TableName, dict[HeadDim, Entry]] = {}
    for choice in choices:
        entries = tables.setdefault(choice.task.table, {})
        entries[choice.task.head_dim] = Entry.of(choice.config, choice.milliseconds)
    return Section.of(card, tables)


def event_clock(launch: Launch) -> float:
    """Return the milliseconds of one launch on the current CUDA device."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    launch()  # keeps the card busy while the host gets ahead
    start.record()
    launch()
    stop.record()
    stop.synchronize()
    milliseconds: float = start.elapsed_time(stop)
    return milliseconds
