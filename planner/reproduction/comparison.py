"""Ours against baselines, on the same GPUs or on others of as many FLOP/s."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hexiseq_triton.planner.bound import fewest_passes, lower_bound_seconds
from hexiseq_triton.planner.cost import Cost
from hexiseq_triton.planner.layouts import BASELINES
from hexiseq_triton.planner.problem import Problem
from hexiseq_triton.planner.reproduction.cells import Cell
from hexiseq_triton.planner.reproduction.contenders import Contenders
from hexiseq_triton.planner.reproduction.judge import Judge, Judged, nameless
from hexiseq_triton.planner.reproduction.rows import Row
from hexiseq_triton.planner.traffic import BF16


@dataclass(frozen=True)
class Best:
    """The fastest of some baselines."""

    name: str
    judged: Judged

    def __str__(self) -> str:
        return f"{self.name}: {self.judged.cost.layout.name}"


def compared(cell: Cell) -> list[Row]:
    """Return a row a mode: ours against baselines on the same GPUs."""
    contenders = Contenders.of(cell.problem)
    rows = []
    for judge in map(Judge, cell.modes):
        paper, other = best_baselines(cell, judge, contenders)
        ours = best_of_ours(judge, contenders, (paper, other))
        notes = _notes(judge, contenders, ours) | {"reasons": contenders.reasons}
        rows.append(row(cell, judge, ours, (paper, other), notes))
    return rows


def held_against(cell: Cell) -> list[Row]:
    """Return a row a mode: ours against the baselines on the cell's other cluster."""
    assert cell.alike is not None
    contenders = Contenders.of(cell.problem)
    others = Contenders.of(cell.problem_on(cell.alike))
    rows = []
    for mode in cell.modes:
        judge, elsewhere = Judge(mode), Judge(mode)
        ours = best_of_ours(judge, contenders)
        best = best_baselines(cell, elsewhere, others)
        notes = _notes(judge, contenders, ours) | {"reasons": others.reasons}
        rows.append(row(cell, judge, ours, best, notes))
    return rows


def best_baselines(
    cell: Cell, judge: Judge, contenders: Contenders
) -> tuple[Best | None, Best | None]:
    """Return the best of the paper's baselines, and of all; None if none fits in memory."""
    paper = best_of(judge, contenders, cell.baselines)
    both = (paper, best_of(judge, contenders, BASELINES))
    found = (best for best in both if best is not None)
    return paper, min(found, key=lambda best: best.judged.seconds, default=None)


def best_of(judge: Judge, contenders: Contenders, names: Iterable[str]) -> Best | None:
    """Return the fastest of some baselines; None if none fits in memory."""
    costs = [(name, cost) for name in names for cost in contenders.of_baseline(name)]
    fastest = judge.fastest(cost for _, cost in costs)
    if fastest is None:
        return None
    layout = nameless(fastest.cost.layout)
    return Best(next(n for n, cost in costs if nameless(cost.layout) == layout), fastest)


def best_of_ours(
    judge: Judge, contenders: Contenders, baselines: Iterable[Best | None] = ()
) -> Judged | None:
    """Return the fastest layout that exchanges as the mode says; None if none fits in memory.

    Layouts of baselines are ours too where they do. `baselines` are those judged already.
    """
    layouts = [*contenders.ours, *contenders.all_baselines]
    found = [judge.fastest(cost for cost in layouts if judge.exchanges_so(cost))]
    found += [best.judged for best in baselines if best is not None]
    fitting = (each for each in found if each is not None and judge.exchanges_so(each.cost))
    return min(fitting, key=lambda each: each.seconds, default=None)


def row(
    cell: Cell,
    judge: Judge,
    ours: Judged | None,
    baselines: tuple[Best | None, Best | None],
    notes: Mapping[str, Any],
) -> Row:
    """Return the row of a cell in the judge's mode; `baselines` are as of `best_baselines`."""
    paper, other = baselines
    seconds = None if ours is None else ours.seconds
    bound = lower_bound_seconds(cell.problem)
    return Row(
        cell.experiment,
        cell.model,
        cell.seq_len,
        judge.mode,
        None if seconds is None else cell.problem.workload.step_tokens / seconds,
        None if paper is None else str(paper),
        _ratio(paper, seconds),
        _ratio(paper, bound),
        None if other is None else str(other),
        _ratio(other, seconds),
        _ratio(other, bound),
        cell.paper,
        {"compute_bound": is_compute_bound(cell.problem), **notes},
    )


def _ratio(baseline: Best | None, seconds: float | None) -> float | None:
    return None if baseline is None or seconds is None else baseline.judged.seconds / seconds


def _notes(judge: Judge, contenders: Contenders, ours: Judged | None) -> dict[str, Any]:
    if ours is None:
        return {}
    layout, found = ours.cost.layout, judge.simulated(ours.cost)
    notes: dict[str, Any] = {
        "layout": layout.name,
        "replicas": len(layout.replicas),
        "passes": layout.accumulation,
        "exposed": float(found.exposed_seconds.mean() / found.step_seconds),
    }
    planned = _planned(contenders)
    if judge.mode == "direct" and planned is not None:
        notes["planned_over_ours"] = judge.judged(planned).seconds / ours.seconds
    return notes


def _planned(contenders: Contenders) -> Cost | None:
    """Return what `hexiseq plan` would choose: the cost model's favourite."""
    return min(contenders.runnable, key=lambda cost: cost.step_seconds, default=None)


def is_compute_bound(problem: Problem) -> bool:
    """Return whether ring attention computes longer on a block of keys than a NIC takes for it.

    Blocks are as large as can be: those of the fewest GPUs on which a sequence of the batch can
    lie, with all GPUs at work and the fewest passes that memory allows. Rates are means over GPUs.
    The rule looks at no plan and at no baseline.
    """
    passes = fewest_passes(problem)
    if passes is None:
        return False
    model, rates = problem.model, problem.rates
    tokens = problem.workload.step_tokens / (passes * problem.cluster.world_size)
    pairs = tokens * tokens * (0.5 if problem.workload.causal else 1.0)
    computing = pairs * problem.work.attention_per_pair * model.heads
    num_bytes = 2 * BF16 * model.kv_heads * model.head_dim * tokens
    return bool(computing / rates.attention_forward.mean() >= num_bytes / rates.across.mean())
