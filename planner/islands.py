"""Homogeneous islands: the GPUs of each model form replicas of their own, as large as suits them.

No replica mixes models, so equal splits waste nothing inside one; a slow model's replicas take
fewer sequences. Each model chooses one size of replica and one hp; of all choices and shares of the
sequences, those with the earliest last replica are taken.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hexiseq_triton.planner.cost import evaluate
from hexiseq_triton.planner.grids import Ranks, divisors
from hexiseq_triton.planner.memory import memory_model
from hexiseq_triton.planner.partition import apportion
from hexiseq_triton.planner.problem import Group, Layout, Problem, Replica
from hexiseq_triton.planner.rates import Ints
from hexiseq_triton.planner.rows import Rows


@dataclass(frozen=True)
class _Choice:
    """One size of replica for the GPUs of one model."""

    model: str
    pools: tuple[Ranks, ...]
    """Ranks of each replica."""
    hp: int
    seconds: float
    """One layer, forward and backward, for each sequence."""
    most: int
    """Sequences a replica's memory holds."""

    def sequences(self, seconds: float) -> int:
        """Return how many sequences a replica finishes in that time."""
        return min(self.most, int(seconds / self.seconds * (1 + 1e-12)))


def islands(problem: Problem) -> list[Layout]:
    """Return the best islands for each number of passes; none where memory forbids them."""
    choices = _choices(problem)
    layouts = []
    for accumulation in problem.workload.accumulations:
        sequences = problem.workload.global_batch // accumulation
        taken = _fastest(choices, sequences)
        if taken is not None:
            layouts.append(_layout(problem, taken, sequences, accumulation))
    return layouts


def _choices(problem: Problem) -> list[_Choice]:
    """Return all choices of all models, each as slow and as small as its least replica."""
    sizes = []
    for model, ranks in _ranks_by_model(problem).items():
        for size in divisors(len(ranks)):
            pools = tuple(ranks[start : start + size] for start in range(0, len(ranks), size))
            for hp in divisors(size):
                if not problem.model.heads % hp:
                    sizes.append((model, pools, hp))
    tried = [list({_make(problem, pool): pool for pool in pools}.values()) for _, pools, _ in sizes]
    # replicas don't touch each other, so one evaluation times all of them side by side
    replicas = [
        _replica(problem, pool, hp, 1)
        for (_, _, hp), pools in zip(sizes, tried, strict=True)
        for pool in pools
    ]
    cost = evaluate(problem, Layout("", tuple(replicas), 1), fluid=True)
    group_starts = np.flatnonzero(np.diff(cost.rows.replica, prepend=-1))
    seconds = np.maximum.reduceat(cost.group_seconds, group_starts)
    most = _most_sequences(problem, cost.rows)
    counts = np.array([len(pools) for pools in tried])
    starts = np.cumsum(counts) - counts
    return [
        _Choice(*size, float(time), int(count))
        for size, time, count in zip(
            sizes,
            np.maximum.reduceat(seconds, starts),
            np.minimum.reduceat(most, starts),
            strict=True,
        )
        if count
    ]


def _make(problem: Problem, pool: Ranks) -> tuple[object, ...]:
    """Return what is alike for pools that take equally long: who shares a node, and the links."""
    nodes: dict[str, int] = {}
    devices = [problem.cluster.devices[rank] for rank in pool]
    return tuple(
        (
            nodes.setdefault(device.node, len(nodes)),
            device.in_node_gb_per_s,
            device.across_gb_per_s,
            device.in_node_latency_us,
            device.across_latency_us,
        )
        for device in devices
    )


def _ranks_by_model(problem: Problem) -> dict[str, Ranks]:
    ranks: dict[str, list[int]] = {}
    for device in problem.cluster.devices:
        ranks.setdefault(device.gpu, []).append(device.rank)
    return {model: tuple(members) for model, members in ranks.items()}


def _fastest(choices: Sequence[_Choice], sequences: int) -> list[_Choice] | None:
    """Return each model's choice for the least time in which all sequences are done."""
    times = sorted(
        {count * choice.seconds for choice in choices for count in range(1, sequences + 1)}
    )
    low, high = 0, len(times) - 1
    if not times or _done(choices, times[high]) < sequences:
        return None
    while low < high:
        middle = (low + high) // 2
        if _done(choices, times[middle]) >= sequences:
            high = middle
        else:
            low = middle + 1
    return list(_best_by_model(choices, times[low]).values())


def _done(choices: Sequence[_Choice], seconds: float) -> int:
    best = _best_by_model(choices, seconds)
    return sum(len(choice.pools) * choice.sequences(seconds) for choice in best.values())


def _best_by_model(choices: Sequence[_Choice], seconds: float) -> dict[str, _Choice]:
    """Return each model's choice that does most sequences in that time."""
    best: dict[str, _Choice] = {}
    for choice in choices:
        known = best.setdefault(choice.model, choice)
        done = len(choice.pools) * choice.sequences(seconds)
        if done > len(known.pools) * known.sequences(seconds):
            best[choice.model] = choice
    return best


def _most_sequences(problem: Problem, rows: Rows) -> Ints:
    """Return how many sequences each replica's memory holds; `rows` hold one in each."""
    memory = memory_model(problem)
    zeros = np.zeros(len(rows.rank)), np.zeros(len(rows.group_starts))
    none = replace(rows, tokens=zeros[0], group_tokens=zeros[1])
    with_none = memory.of_moments(none) + memory.beside(none)
    used = memory.of_moments(rows) + memory.beside(rows) - with_none
    room = problem.rates.memory_limit[rows.rank] - with_none
    most = np.where(used > 0, np.floor(room / np.maximum(used, 1.0)), np.where(room < 0, 0, np.inf))
    fitting = np.minimum.reduceat(most.min(axis=0), rows.replica_starts)
    result: Ints = np.maximum(fitting, 0).astype(np.int64)
    return result


def _layout(
    problem: Problem, taken: Sequence[_Choice], sequences: int, accumulation: int
) -> Layout:
    """Give out the sequences one by one, each to the replica that is done with it first."""
    queue = [
        (choice.seconds, at, 1, choice, pool)
        for at, (choice, pool) in enumerate((c, pool) for c in taken for pool in c.pools)
        if choice.most
    ]
    heapq.heapify(queue)
    counts: dict[Ranks, tuple[_Choice, int]] = {}
    for _ in range(sequences):
        _, at, count, choice, pool = heapq.heappop(queue)
        counts[pool] = (choice, count)
        if count < choice.most:
            heapq.heappush(queue, ((count + 1) * choice.seconds, at, count + 1, choice, pool))
    replicas = [
        _replica(problem, pool, choice.hp, count) for pool, (choice, count) in counts.items()
    ]
    sizes = ", ".join(
        f"{choice.model} cp {len(choice.pools[0]) // choice.hp} x hp {choice.hp}"
        for choice in taken
        if any(pool in counts for pool in choice.pools)
    )
    return Layout(sizes, tuple(replicas), accumulation)


def _replica(problem: Problem, ranks: Ranks, hp: int, sequences: int) -> Replica:
    """Return one replica with equal tokens and heads."""
    tokens = apportion(sequences * problem.workload.seq_len, [1] * len(ranks))
    heads = (problem.model.heads // hp,) * hp
    return Replica(
        tuple(
            Group(ranks[start : start + hp], tuple(tokens[start : start + hp]), heads)
            for start in range(0, len(ranks), hp)
        ),
        sequences,
    )
