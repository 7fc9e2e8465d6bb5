"""One section of the page for each kind of experiment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.reproduction.experiments import Kind, Named
from hexiseq_triton.planner.reproduction.rows import Row
from hexiseq_triton.planner.reproduction.statistics import share_reached, swept_rows
from hexiseq_triton.reports.reproduction.markdown import (
    figure,
    length,
    more,
    percent,
    rate,
    ratio,
    seconds,
    table,
)


def _comparison(named: Named, rows: Sequence[Row]) -> list[str]:
    lines = []
    first, *others = named.experiment.modes
    for cluster in named.clusters:
        name = named.name if len(named.clusters) == 1 else f"{named.name}: {cluster}"
        mine = [row for row in rows if row.experiment == name]
        by_mode = {(row.mode, row.model, row.seq_len): row for row in mine}
        shown = [
            [
                *_sides(row),
                *(ratio(by_mode[m, row.model, row.seq_len].speedup_paper) for m in others),
                percent(row.notes.get("exposed")),
                "yes" if row.notes.get("compute_bound") else "no",
                more(row.notes.get("planned_over_ours")),
                figure(row.paper),
            ]
            for row in mine
            if row.mode == first
        ]
        lines += [f"{cluster}, mode {first}.", ""]
        speedups = [f"speed-up {mode}" for mode in others]
        lines += table(
            [*_SIDES, *speedups, "exposed", "compute-bound", "plan's choice", "paper"], shown
        )
        lines += _without_baselines([row for row in mine if row.mode == first])
    return [*lines, *_sweep(named, rows)]


_SIDES = ["model", "tokens", "ours tokens/s", "best of the paper's", "speed-up", "bound",
          "reached", "best of any", "speed-up", "bound"]  # fmt: skip


def _sides(row: Row) -> list[str]:
    return [
        row.model,
        length(row.seq_len),
        rate(row.ours),
        row.baseline_paper or "none fits",
        ratio(row.speedup_paper),
        ratio(row.bound_paper),
        percent(share_reached(row)),
        row.baseline_any or "none fits",
        ratio(row.speedup_any),
        ratio(row.bound_any),
    ]


def _without_baselines(rows: Sequence[Row]) -> list[str]:
    """List the cells in which all of the paper's baselines run out of memory, and why."""
    lines = []
    for row in rows:
        if row.baseline_paper is None:
            reason = row.notes.get("reasons", {}).get("usp", "")
            lines.append(
                f"- {row.model}, {length(row.seq_len)}: none of the paper's baselines fits (usp: "
                f"{reason}); ours {'runs at ' + rate(row.ours) if row.ours else 'does not either'}."
            )
    return ["", *lines] if lines else []


def _sweep(named: Named, rows: Sequence[Row]) -> list[str]:
    found = [row for swept in swept_rows(named, rows).values() for row in swept]
    if not found:
        return []
    shown = [[row.experiment.split(": ", 1)[1], *_sides(row)] for row in found]
    return ["", f"Sweep, mode {named.experiment.modes[0]}.", "", *table(["with", *_SIDES], shown)]


def _parity(named: Named, rows: Sequence[Row]) -> list[str]:
    assert named.alike is not None
    counts = Counter(device.gpu for device in named.alike.devices)
    other = " + ".join(f"{count} {gpu}" for gpu, count in counts.items())
    shown = [[*_sides(row), percent(row.notes.get("exposed")), figure(row.paper)] for row in rows]
    lines = [f"Ours on {next(iter(named.clusters))}; baselines on {other}, mode direct.", ""]
    lines += table([*_SIDES, "exposed", "paper"], shown)
    for model in named.experiment.models:
        heads = ModelSpec.load(model).heads
        if heads < named.alike.world_size:
            lines += [
                "",
                f"Ulysses on all {named.alike.world_size} as one group is impossible for {model}, "
                f"which has {heads} heads; it runs inside replicas.",
            ]
    return lines


def _planning(named: Named, rows: Sequence[Row]) -> list[str]:
    shown = [
        [
            row.experiment.split(": ", 1)[1],
            row.model,
            length(row.seq_len),
            "nothing fits" if row.ours is None else f"{row.ours:.3g}",
            seconds(row.notes.get("cpu_seconds")),
            figure(row.paper),
        ]
        for row in rows
    ]
    lines = [
        "Seconds by the clock, warm, from parsed files to a checked plan; CPU seconds leave out "
        "what other programs of the machine took.",
        "",
    ]
    return [*lines, *table(["cluster", "model", "tokens", "s", "CPU s", "paper s"], shown)]


def _ablation(named: Named, rows: Sequence[Row]) -> list[str]:
    lines = [
        "Mode direct: speed as a share of what everything together reaches, and in brackets the "
        "speed-up over the paper's baselines. What each line leaves out stands in "
        "[ablations.py](../planner/reproduction/ablations.py)."
    ]
    for cluster in named.clusters:
        several = len(named.clusters) > 1
        before = f"{named.name}: {cluster}: " if several else f"{named.name}: "
        by_cell = {
            (row.experiment.removeprefix(before), row.model, row.seq_len): row
            for row in rows
            if row.experiment.startswith(before)
        }
        names = list(dict.fromkeys(name for name, _, _ in by_cell))
        cells = list(dict.fromkeys((model, seq_len) for _, model, seq_len in by_cell))
        shown = [
            [name, *(_share(by_cell[(name, *cell)], by_cell[("all", *cell)]) for cell in cells)]
            for name in names
        ]
        titles = [f"{model}, {length(seq_len)}" for model, seq_len in cells]
        lines += ["", f"{cluster}.", "", *table(["with", *titles], shown)]
    return lines


def _share(row: Row, whole: Row) -> str:
    if row.ours is None or whole.ours is None:
        return "does not fit"
    fits = "" if row.notes["fits"] else ", does not fit"
    return f"{row.ours / whole.ours:.3f} ({ratio(row.speedup_paper)}x){fits}"


def _optimality(named: Named, rows: Sequence[Row]) -> list[str]:
    shown = []
    for row in rows:
        cluster, method = row.experiment.split(": ")[1:]
        gap = row.notes.get("certified_gap")
        shown.append(
            [
                cluster,
                row.model,
                length(row.seq_len),
                method,
                rate(row.ours),
                "-" if row.speedup_any is None else f"{row.speedup_any:.3f}",
                "" if gap is None else f"{gap:.2%}",
            ]
        )
    lines = [
        "The cost model judges. `over the grid` is the speed over that of the best of all layouts "
        "of a coarse grid ([optimality.py](../planner/reproduction/optimality.py)), where those "
        "can be counted; `proved` is what CBC leaves open inside the groups.",
        "",
    ]
    titles = ["cluster", "model", "tokens", "method", "tokens/s", "over the grid", "proved"]
    return [*lines, *table(titles, shown)]


SECTIONS: dict[Kind, Callable[[Named, Sequence[Row]], list[str]]] = {
    "comparison": _comparison,
    "parity": _parity,
    "planning_time": _planning,
    "ablation": _ablation,
    "optimality": _optimality,
}
