"""Means over experiments beside the paper's, and what moves them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hexiseq_triton.planner.reproduction.experiments import Named, PaperFigure
from hexiseq_triton.planner.reproduction.rows import Row
from hexiseq_triton.planner.reproduction.statistics import (
    Speedups,
    geometric_mean,
    main_rows,
    swept_rows,
)
from hexiseq_triton.reports.reproduction.markdown import cell_name, length, ratio, table

_MEANS = ("speed-up over the paper's baselines", "cells", "geometric mean", "arithmetic mean",
          "largest", "of", "mean bound")  # fmt: skip
_FELT = 0.01
"""A change of the mean that is smaller is not named among the causes."""
_CHANGES = ("changed", "tokens", "cells", "mean without", "mean with", "times")


@dataclass(frozen=True)
class Change:
    """One thing changed: the rows with it, and those without it that have them as a pair."""

    name: str
    without: Sequence[Row]
    changed: Sequence[Row]

    @classmethod
    def of(cls, name: str, before: Iterable[Row], after: Iterable[Row]) -> Change:
        """Pair rows of the same experiment, model and length that both have a speed-up."""
        known = {_place(row): row for row in before if row.speedup_paper is not None}
        changed = [r for r in after if r.speedup_paper is not None and _place(r) in known]
        return cls(name, [known[_place(row)] for row in changed], changed)

    @property
    def means(self) -> tuple[float, float]:
        """Geometric means without and with it."""
        before, after = (
            geometric_mean([row.speedup_paper for row in rows if row.speedup_paper is not None])
            for rows in (self.without, self.changed)
        )
        return before, after

    @property
    def times(self) -> float:
        before, after = self.means
        return after / before


@dataclass(frozen=True)
class Group:
    """Experiments that are averaged together, and all rows."""

    name: str
    named: Sequence[Named]
    rows: Sequence[Row]

    @property
    def modes(self) -> tuple[str, ...]:
        return self.named[0].experiment.modes

    @property
    def paper(self) -> dict[str, PaperFigure]:
        """The paper's mean and largest figure, by those names."""
        figures = self.named[0].experiment.paper
        return {f.statistic: f for f in figures if f.statistic != "cell"}

    def in_mode(self, mode: str) -> list[Row]:
        """Return the rows of a mode, sweeps left out."""
        return [row for each in self.named for row in main_rows(each, self.rows, mode)]

    @cached_property
    def changes(self) -> list[Change]:
        """What was changed: the mode, who chooses, and all that the sweeps change."""
        first, *others = self.modes
        now = self.in_mode(first)
        found = [Change.of(f"mode {mode}", now, self.in_mode(mode)) for mode in others]
        found.append(Change.of("plan's choice", now, map(as_planned, now)))
        swept: dict[str, list[Row]] = {}
        for each in self.named:
            for name, rows in swept_rows(each, self.rows).items():
                swept.setdefault(name, []).extend(rows)
        found += [Change.of(name, now, rows) for name, rows in swept.items()]
        return [change for change in found if change.changed]


def as_planned(row: Row) -> Row:
    """Return the row if the cost model chose, as in `hexiseq plan`."""
    longer = row.notes.get("planned_over_ours")
    if longer is None or row.speedup_paper is None:
        return replace(row, speedup_paper=None)
    return replace(row, speedup_paper=row.speedup_paper / longer)


def beside_the_paper(group: Group) -> list[str]:
    """Return the section of a group."""
    names = ", ".join(each.name for each in group.named)
    lines = ["", f"## The {group.name} ({names}) beside the paper's figures", ""]
    mean, most = (ratio(group.paper[name].value) for name in ("mean", "max"))
    first = group.modes[0]
    shown = [["paper; which mean, it does not say", "-", mean, mean, most, "-", "-"]]
    shown += [_means(mode, group.in_mode(mode)) for mode in group.modes]
    compute_bound = [row for row in group.in_mode(first) if row.notes.get("compute_bound")]
    shown.append(_means(f"{first}, compute-bound cells", compute_bound))
    lines += table(_MEANS, [line for line in shown if line])
    sources = "; ".join(f"{ratio(f.value)}: {f.source}" for f in group.paper.values())
    lines += ["", f"The paper's figures are from: {sources}."]
    if group.changes:
        lines += ["", f"What moves the mean of mode {first}:", ""]
        lines += table(_CHANGES, list(_changes(group)))
    remarks = (each.experiment.remark for each in group.named)
    return [*lines, "", *_causes(group), *(f"\n{remark}" for remark in remarks if remark)]


def _means(title: str, rows: Iterable[Row]) -> list[str]:
    found = Speedups.of(rows)
    if found is None:
        return []
    means = (found.geometric, found.arithmetic, found.most.speedup_paper)
    return [title, str(found.cells), *map(ratio, means), cell_name(found.most), ratio(found.bound)]


def _changes(group: Group) -> Iterator[list[str]]:
    for change in group.changes:
        lengths = ", ".join(length(n) for n in sorted({row.seq_len for row in change.changed}))
        ratios = (*change.means, change.times)
        yield [change.name, lengths, str(len(change.changed)), *map(ratio, ratios)]


def _causes(group: Group) -> list[str]:
    """Say of what the differences to the paper's mean and largest figure can come."""
    found = Speedups.of(group.in_mode(group.modes[0]))
    if found is None:
        return []
    paper, most = group.paper["mean"].value, group.paper["max"].value
    wanted = paper / found.geometric
    that_way = [
        change.name
        for change in group.changes
        if abs(change.times - 1) >= _FELT and (change.times - 1) * (wanted - 1) > 0
    ]
    return [
        f"Why {ratio(found.geometric)} and not {ratio(paper)}: a mean is the mean bound times the "
        f"share of it that is reached, here {ratio(found.bound)} x "
        f"{found.geometric / found.bound:.0%}. The bound follows from who is in the cluster and "
        "how fast each is; the paper gives neither its counts nor its rates. From ours to the "
        f"paper's mean it takes {ratio(wanted)} times, and these changes go that way: "
        f"{', '.join(that_way) or 'none'}.",
        "",
        f"Why {ratio(found.most.speedup_paper)} at most and not {ratio(most)}: the bound there, "
        f"{cell_name(found.most)}, is {ratio(found.most.bound_paper)}; it moves with the same "
        "counts and rates. Cells in which all of the paper's baselines run out of memory have no "
        "ratio, and are in no mean. Nothing was tuned towards the paper's figures.",
    ]


def _place(row: Row) -> tuple[str, str, int]:
    return row.experiment.split(":")[0], row.model, row.seq_len
