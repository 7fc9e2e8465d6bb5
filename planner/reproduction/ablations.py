"""What each freedom is worth: the same search with one taken away, judged alike.

Of the layouts that are left, the fastest counts, as in `comparison`.

    stage I off         no choice of groups: ranks are dealt to groups of equal size in turn,
                        whatever links they have; all sizes, one replica
    stage II off        groups as searched; every rank of a replica has equal tokens, heads follow
    stage III off       groups and their tokens as searched; equal tokens and heads inside each
    one replica         all GPUs work on the same sequences
    tokens only         as searched, but with equal heads
    heads only          as stage II off, but heads are in proportion to speed
    paper's rules       groups inside nodes, their tokens in proportion to speed or its square root,
                        equal tokens and heads inside each; one replica, as many passes as can be
    coordinate descent  the same, and then single heads and blocks of tokens move while that helps
    equal-group USP     every rank equal tokens and heads; all sizes of group
    no memory limit     layouts that exceed memory too
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from hexiseq_triton.planner.balance import Dealing, balanced
from hexiseq_triton.planner.cost import Cost, evaluate
from hexiseq_triton.planner.descent import descended
from hexiseq_triton.planner.lineup import Lineup
from hexiseq_triton.planner.partition import apportion
from hexiseq_triton.planner.problem import Group, Problem, Replica
from hexiseq_triton.planner.reproduction.cells import Cell
from hexiseq_triton.planner.reproduction.comparison import (
    Best,
    best_baselines,
    best_of_ours,
    row,
)
from hexiseq_triton.planner.reproduction.contenders import SLOWER, Contenders, fastest
from hexiseq_triton.planner.reproduction.judge import Judge, Judged
from hexiseq_triton.planner.reproduction.rows import Row
from hexiseq_triton.planner.search import Options
from hexiseq_triton.planner.stages import Frame, Splitter

_POWERS = (1.0, 0.5)
_LAYOUTS = 32
"""Of what is left, so many of the best by the cost model are simulated."""
_ROUNDS = 6
_ALL_THE_MEMORY = 1000.0
_Baselines = tuple[Best | None, Best | None]


def ablated(cell: Cell) -> list[Row]:
    """Return a row for everything, and one for each freedom less."""
    judge, contenders = Judge(cell.modes[0]), Contenders.of(cell.problem)
    best = best_baselines(cell, judge, contenders)
    found = {"all": best_of_ours(judge, contenders, best)}
    for name, layouts in _less(contenders):
        found[name] = judge.fastest(fastest(layouts, _LAYOUTS))
    found["equal-group USP"] = judge.fastest(contenders.of_baseline("equal_split"))
    rows = [_row(cell, judge, name, ours, best) for name, ours in found.items()]
    return [*rows, _unlimited(cell, judge, best)]


def _row(
    cell: Cell, judge: Judge, name: str, ours: Judged | None, best: _Baselines, fits: bool = True
) -> Row:
    named = replace(cell, experiment=f"{cell.experiment}: {name}")
    layout = None if ours is None else ours.cost.layout.name
    return row(named, judge, ours, best, {"layout": layout, "fits": fits and ours is not None})


def _unlimited(cell: Cell, judge: Judge, best: _Baselines) -> Row:
    """Return the row of the fastest layout if memory were no limit."""
    problem = replace(cell.problem, memory_limit_share=_ALL_THE_MEMORY)
    ours = best_of_ours(Judge(judge.mode), Contenders.of(problem))
    assert ours is not None, "everything fits"
    fits = evaluate(cell.problem, ours.cost.layout).fits
    return _row(cell, judge, "no memory limit", ours, best, fits)


def _less(contenders: Contenders) -> Iterator[tuple[str, Iterable[Cost]]]:
    """Yield the layouts that are left with one freedom less."""
    problem = contenders.problem
    splitter = Splitter(problem)

    def changed(change: Callable[[Replica], Replica]) -> list[Cost]:
        return [_changed(cost, change) for cost in contenders.ours]

    yield "stage I off", dealt_in_turn(splitter)
    yield "stage II off", changed(lambda replica: even_ranks(splitter, replica))
    yield "stage III off", changed(lambda replica: even_heads(even_inside(replica)))
    yield "one replica", _one_replica(problem)
    yield "tokens only", changed(even_heads)
    yield "heads only", changed(lambda replica: heads_by_speed(problem, even_tokens(replica)))
    yield "paper's rules", [descended(problem, power, most_steps=1) for power in _POWERS]
    yield "coordinate descent", [descended(problem, power) for power in _POWERS]


def _changed(cost: Cost, change: Callable[[Replica], Replica]) -> Cost:
    replicas = tuple(change(replica) for replica in cost.layout.replicas)
    return evaluate(cost.problem, replace(cost.layout, replicas=replicas))


def _one_replica(problem: Problem) -> list[Cost]:
    lineup = Lineup(problem, Options(replicas=False))
    best = lineup.best()
    return [best, *lineup.layouts(SLOWER * best.step_seconds)]


def dealt_in_turn(splitter: Splitter) -> list[Cost]:
    """Return one replica of all ranks for each number of groups and passes; ranks go in turn."""
    problem = splitter.problem
    ranks, workload = range(problem.cluster.world_size), problem.workload
    return [
        balanced(
            splitter,
            Frame("", passes),
            Dealing(
                f"{count} groups in turn",
                [tuple(ranks[first::count]) for first in range(count)],
                workload.global_batch // passes,
                _ROUNDS,
            ),
        )
        for passes in workload.accumulations
        for count in range(1, len(ranks) + 1)
        if not len(ranks) % count and len(ranks) // count <= problem.model.heads
    ]


# -------------------------------------------------------------------- replicas changed


def even_tokens(replica: Replica) -> Replica:
    """Return the replica with equal tokens on every rank."""
    sizes = [len(group.ranks) for group in replica.groups]
    tokens = iter(apportion(replica.num_tokens, [1] * sum(sizes)))
    return _with(replica, lambda group: {"tokens": tuple(next(tokens) for _ in group.ranks)})


def even_ranks(splitter: Splitter, replica: Replica) -> Replica:
    """Return the replica with tokens for groups by their ranks' number, split by stage III."""
    alone = len(replica.groups) == 1
    groups = (
        splitter.split(group.ranks, group.num_tokens, alone)[0]
        for group in even_tokens(replica).groups
    )
    return replace(replica, groups=tuple(groups))


def even_inside(replica: Replica) -> Replica:
    """Return the replica with each group's tokens equal on all its ranks."""

    def even(group: Group) -> dict[str, tuple[int, ...]]:
        return {"tokens": tuple(apportion(group.num_tokens, [1] * len(group.ranks)))}

    return _with(replica, even)


def even_heads(replica: Replica) -> Replica:
    """Return the replica with each group's heads equal on all its ranks."""

    def even(group: Group) -> dict[str, tuple[int, ...]]:
        return {"heads": tuple(apportion(sum(group.heads), [1] * len(group.ranks)))}

    return _with(replica, even)


def heads_by_speed(problem: Problem, replica: Replica) -> Replica:
    """Return the replica with each group's heads in proportion to its ranks' attention."""
    seconds = problem.seconds_per_token[1].sum(axis=0)
    speeds = np.rint(1e6 * seconds.min() / seconds).astype(int)

    def by_speed(group: Group) -> dict[str, tuple[int, ...]]:
        weights = speeds[list(group.ranks)].tolist()
        return {"heads": tuple(apportion(sum(group.heads), weights))}

    return _with(replica, by_speed)


def _with(replica: Replica, change: Callable[[Group], dict[str, tuple[int, ...]]]) -> Replica:
    groups = tuple(replace(group, **change(group)) for group in replica.groups)
    return replace(replica, groups=groups)
