"""Grids: replicas of cp groups of hp ranks each, with equal heads; most baselines are grids.

A grid takes a list of ranks and lays replicas, groups and positions over it. Head-first, the hp
ranks of a group follow each other in the list, so that groups lie inside nodes; context-first, the
cp ranks that exchange KV do, and groups run across nodes. The order of the list decides who shares
a group, who holds the last tokens, and which links the exchange uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hexiseq_triton.planner.cost import side_by_side
from hexiseq_triton.planner.partition import apportion
from hexiseq_triton.planner.plans import Arrangement, Exchange
from hexiseq_triton.planner.problem import Group, Layout, Problem, Replica
from hexiseq_triton.planner.rates import Floats, Ints
from hexiseq_triton.planner.rows import Rows
from hexiseq_triton.planner.sight import fluid_sight

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Shape:
    """How a grid is laid over its ranks."""

    accumulation: int
    replicas: int
    cp: int
    hp: int
    context_first: bool = False
    proportional: bool = False
    """Tokens in proportion to each rank's speed, instead of equal."""
    arrangement: Arrangement = "balanced"
    exchange: Exchange = "routes"

    @property
    def name(self) -> str:
        name = f"cp {self.cp} x hp {self.hp}"
        if self.replicas > 1:
            name += f" in {self.replicas} replicas"
        if self.context_first and min(self.cp, self.hp) > 1:
            name += ", context-first"
        return name


def shapes(problem: Problem, count: int, heads: int) -> Iterator[Shape]:
    """Yield all shapes over `count` ranks whose hp divides `heads`, for every number of passes."""
    workload = problem.workload
    for accumulation in workload.accumulations:
        sequences = workload.global_batch // accumulation
        for replicas in divisors(sequences):
            if count % replicas:
                continue
            each = count // replicas
            for hp in divisors(each):
                if not heads % hp:
                    yield Shape(accumulation, replicas, each // hp, hp)


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, smallest first."""
    return [d for d in range(1, number + 1) if not number % d]


def orders(problem: Problem, ranks: Sequence[int]) -> dict[str, Ranks]:
    """Return the orders of ranks to try: as numbered, and by speed, node by node."""
    found = {tuple(sorted(ranks)): ""}
    node, speed = problem.rates.node, speeds(problem)
    of_node = np.bincount(node, speed) / np.bincount(node)
    for name, sign in ((", fast GPUs last", 1), (", fast GPUs first", -1)):
        by_speed = sorted(ranks, key=lambda r: (sign * of_node[node[r]], node[r], speed[r], r))
        found.setdefault(tuple(by_speed), name)
    return {name: order for order, name in found.items()}


def speeds(problem: Problem) -> Floats:
    """Return the tokens each rank computes in a second, alone."""
    seconds, attention = problem.seconds_per_token
    result: Floats = 1 / (seconds + problem.model.heads * attention).sum(axis=0)
    return result


@dataclass(frozen=True)
class Grid:
    """A shape over ranks of a problem."""

    shape: Shape
    ranks: Ranks
    suffix: str = ""

    def layout(self, problem: Problem) -> Layout:
        """Return the grid as a layout."""
        shape, total = self.shape, self.sequences(problem) * problem.workload.seq_len
        heads = (problem.model.heads // shape.hp,) * shape.hp
        replicas = []
        for members, shares in zip(self.members, self.shares(speeds(problem)), strict=True):
            weights = np.rint(shares * 1e9).astype(np.int64)
            tokens = apportion(total, weights.ravel().tolist())
            starts = range(0, len(tokens), shape.hp)
            groups = (
                Group(tuple(group), tuple(tokens[start : start + shape.hp]), heads)
                for group, start in zip(members.tolist(), starts, strict=True)
            )
            replicas.append(Replica(tuple(groups), self.sequences(problem)))
        name = shape.name + self.suffix
        if problem.model.kv_heads % shape.hp:
            name += ", KV heads replicated"
        return Layout(name, tuple(replicas), shape.accumulation, shape.arrangement, shape.exchange)

    def sequences(self, problem: Problem) -> int:
        """Return the sequences of each replica in one pass."""
        return problem.workload.global_batch // (self.shape.accumulation * self.shape.replicas)

    @cached_property
    def members(self) -> Ints:
        """Ranks as [replicas, cp, hp]."""
        shape, ranks = self.shape, np.array(self.ranks)
        if shape.context_first:
            return ranks.reshape(shape.replicas, shape.hp, shape.cp).swapaxes(1, 2)
        return ranks.reshape(shape.replicas, shape.cp, shape.hp)

    def shares(self, speed: Floats) -> Floats:
        """Return each rank's share of its replica's tokens, as `members`."""
        weights = np.ones(self.members.shape)
        if self.shape.proportional:
            weights = speed[self.members]
        result: Floats = weights / weights.sum(axis=(1, 2), keepdims=True)
        return result


def estimated_seconds(problem: Problem, grids: Sequence[Grid]) -> Floats:
    """Return a step's seconds of each grid: the evaluator's, but for tokens not rounded.

    All grids have one arrangement and one exchange; they are evaluated side by side, which takes
    little longer than one of them.
    """
    speed, first = speeds(problem), grids[0].shape
    shapes = [grid.shape for grid in grids]
    replicas = np.array([shape.replicas for shape in shapes])
    cp, hp = (np.repeat([getattr(s, name) for s in shapes], replicas) for name in ("cp", "hp"))
    sequences = np.repeat([grid.sequences(problem) for grid in grids], replicas)
    shares = np.concatenate([grid.shares(speed).ravel() for grid in grids])
    sizes = np.repeat(hp, cp)
    rows = Rows.from_arrays(
        problem,
        rank=np.concatenate([grid.members.ravel() for grid in grids]),
        tokens=shares * np.repeat(sequences * problem.workload.seq_len, cp * hp),
        heads=np.repeat(problem.model.heads // sizes, sizes),
        sizes=sizes,
        replica=np.repeat(np.arange(len(cp)), cp),
    )
    sight = fluid_sight(problem, rows, sequences, first.arrangement)
    passes = np.array([shape.accumulation for shape in shapes])
    return side_by_side(problem, rows, sight, first.exchange, replicas, passes)
