"""Baselines: the layouts others use, judged by the same evaluator as ours.

All of them split tokens and heads equally, and each is tuned over its own degrees. The runtime can
carry out all of them, so each is a candidate for the answer as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hexiseq_triton.errors import InfeasibleError
from hexiseq_triton.planner.cost import Cost, evaluate
from hexiseq_triton.planner.partition import apportion
from hexiseq_triton.planner.problem import Group, Layout, Problem


@dataclass(frozen=True)
class Priced:
    """A baseline's best layout, or why it has none. A tuned one's reason names its degrees."""

    cost: Cost | None
    reason: str | None = None


def price(problem: Problem, baseline: str) -> Priced:
    """Return the fastest layout of a baseline that fits in memory."""
    try:
        costs = [evaluate(problem, layout) for layout in BASELINES[baseline](problem)]
    except InfeasibleError as error:
        return Priced(None, str(error))
    fitting = [cost for cost in costs if cost.fits]
    if fitting:
        best = min(fitting, key=lambda cost: cost.step_seconds)
        return Priced(best, best.layout.name if len(costs) > 1 else None)
    nearest = min(costs, key=excess)
    return Priced(None, out_of_memory(problem, nearest))


def excess(cost: Cost) -> float:
    """Return the largest share of its limit that any rank needs."""
    return float((cost.memory_bytes / cost.memory_limit).max())


def out_of_memory(problem: Problem, cost: Cost) -> str:
    """Say which rank's memory binds, what it needs, and what it may use."""
    rank = cost.fullest_rank
    device = problem.cluster.devices[rank]
    needed, limit = cost.memory_bytes[rank] / 1e9, cost.memory_limit[rank] / 1e9
    return (
        f"out of memory: rank {rank} ({device.gpu} of node {device.node}) needs {needed:.1f} GB "
        f"and may use {limit:.1f} GB"
    )


def ring(problem: Problem) -> list[Layout]:
    """Groups of one, contiguous runs of equal length: the last rank has most causal work."""
    return [Layout("ring", _grid(problem, 1), "contiguous")]


def zigzag_ring(problem: Problem) -> list[Layout]:
    """Groups of one, each with two mirrored pieces of equal length."""
    return [Layout("zigzag_ring", _grid(problem, 1))]


def ulysses(problem: Problem) -> list[Layout]:
    """One group of all ranks."""
    heads, world = problem.model.heads, problem.cluster.world_size
    if heads % world:
        raise InfeasibleError(f"{heads} query heads do not divide by {world} ranks")
    return [Layout("ulysses", _grid(problem, world))]


def usp(problem: Problem) -> list[Layout]:
    """Every factor pair: cp groups of hp consecutive ranks, so in a node where hp fits one."""
    heads, world = problem.model.heads, problem.cluster.world_size
    degrees = [hp for hp in range(1, world + 1) if not world % hp and not heads % hp]
    return [Layout(f"cp {world // hp} x hp {hp}", _grid(problem, hp)) for hp in degrees]


BASELINES: dict[str, Callable[[Problem], list[Layout]]] = {
    "ring": ring,
    "zigzag_ring": zigzag_ring,
    "ulysses": ulysses,
    "usp": usp,
}


def _grid(problem: Problem, hp: int) -> tuple[Group, ...]:
    """Return groups of `hp` consecutive ranks with equal tokens and heads."""
    world = problem.cluster.world_size
    tokens = apportion(problem.workload.stream_tokens, [1] * world)
    heads = (problem.model.heads // hp,) * hp
    return tuple(
        Group(tuple(range(start, start + hp)), tuple(tokens[start : start + hp]), heads)
        for start in range(0, world, hp)
    )
