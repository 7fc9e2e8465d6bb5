"""A plan on the terminal: who holds what, what it takes, and what it was compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from hexiseq_triton.planner.bound import Bound
from hexiseq_triton.planner.certify import Certificate
from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.cost import Cost
from hexiseq_triton.planner.fsdp import boundary_seconds, optimizer_seconds
from hexiseq_triton.planner.plans import BaselineResult, Plan
from hexiseq_triton.planner.rates import Floats
from hexiseq_triton.planner.terms import Terms
from hexiseq_triton.reports.plan_rows import Row, Section, plan_sections, spans
from hexiseq_triton.reports.terminal import print_line, print_table
from hexiseq_triton.wording import counted

BAR_CELLS = 5
_BAR, _ASCII_BAR = "█░", "#."
"""What is used, and what is not."""
WIDE = 100
"""Columns of a terminal from which on nodes and bars are shown."""
RANKS_A_TABLE = 6
_PLAIN: dict[str, Any] = {
    "box": SIMPLE_HEAD,
    "padding": (0, 1, 0, 0),
    "show_edge": False,
    "pad_edge": False,
}


def print_plan(plan: Plan, console: Console) -> None:
    """Print who holds what, what it is predicted to take, and what it was compared with."""
    table = plan_table(plan, wide=console.width >= WIDE, ascii_only=console.options.ascii_only)
    print_table(table, console)
    if plan.baselines:
        print_table(baseline_table(plan), console)
    for line in summary_lines(plan):
        print_line(line, console)


def summary_lines(plan: Plan) -> list[str]:
    """Return who takes how many sequences, the prediction, its gap, and the plan's notes."""
    lines = [_passes(plan)]
    if plan.predicted is not None:
        lines.append(
            f"{plan.predicted.step_seconds:.4g} s a step, "
            f"{plan.predicted.tokens_per_second:,.0f} tokens/s"
        )
    if plan.lower_bound_seconds is not None and plan.gap is not None:
        parts = ", ".join(f"{name} {share:.1%}" for name, share in plan.gap_parts.items())
        lines.append(
            f"no plan can be faster than {plan.lower_bound_seconds:.4g} s: gap {plan.gap:.1%}"
            + (f" ({parts})" if parts else "")
        )
    return [*lines, *plan.notes]


def _passes(plan: Plan) -> str:
    """Say how many passes a step has, and how many sequences each replica takes in one."""
    by_count: dict[int, list[int]] = {}
    for index, replica in enumerate(plan.replicas):
        by_count.setdefault(replica.sequences, []).append(index)
    parts = [
        f"{count} in replica{'s' * (len(members) > 1)} {spans(members)}"
        for count, members in by_count.items()
    ]
    return f"passes a step: {plan.accumulation}; sequences a pass: {', '.join(parts)}"


def assumed_lines(cluster: Cluster) -> list[str]:
    """Return a line for each GPU model with figures that nobody measured and no vendor gave."""
    lines = []
    for gpu in cluster.gpus:
        figures = cluster.assumed(gpu)
        if figures:
            named = ", ".join(f"{name} {value:g}" for name, value in figures.items())
            lines.append(f"assumed of {gpu}: {named}")
    return lines


def plan_table(plan: Plan, *, wide: bool = True, ascii_only: bool = False) -> Table:
    """Return a table with one row a rank, or on large clusters one for ranks that are alike.

    Unknown figures are a dash. A column in which all rows would say the same is left out: the
    replica of a plan with one, KV heads where each query head has its own. Tables that are not
    `wide` have neither nodes nor bars; bars are of ASCII characters if it is all there is.
    """
    sections = plan_sections(plan)
    merged = any(len(row.shares) > 1 for section in sections for row in section.rows)
    columns = _columns(plan, with_node=wide and not merged)
    bar = (_ASCII_BAR if ascii_only else _BAR) if wide else ""
    table = Table(title=plan.strategy, **_PLAIN)
    table.caption = "\n".join(_remarks(plan, merged)) or None
    for name in columns:
        left = name in ("replica", "group", "rank", "gpu", "node")
        may_wrap = name == "rank"
        table.add_column(
            name,
            justify="left" if left else "right",
            no_wrap=not may_wrap,
            min_width=4 if may_wrap else None,
        )
    for section in sections:
        for index, row in enumerate(section.rows):
            cells = (_labels(section) if index == 0 else {}) | _cells(row, bar)
            table.add_row(*(cells.get(name, "") for name in columns))
    return table


def _columns(plan: Plan, *, with_node: bool) -> list[str]:
    columns = ["group", "rank", "gpu", "tokens", "heads", "busy s", "memory GB"]
    if plan.q_per_kv > 1:
        columns.insert(5, "KV")
    if with_node:
        columns.insert(3, "node")
    return columns if len(plan.replicas) == 1 else ["replica", *columns]


def _remarks(plan: Plan, merged: bool) -> list[str]:
    remarks = []
    if merged:
        remarks.append("xN: N groups alike; figures of one rank, from least to most")
    idle = set(range(plan.world_size)) - {share.rank for share in plan.shares}
    if idle:
        remarks.append(f"idle: ranks {spans(idle)}; they hold only their part of the states")
    return remarks


def _labels(section: Section) -> dict[str, str]:
    groups = section.groups
    label = str(groups[0]) if len(groups) == 1 else f"x{len(groups)}"
    return {"replica": spans(section.replicas), "group": label}


def _cells(row: Row, bar: str) -> dict[str, str]:
    return {
        "rank": row.ranks,
        "gpu": row.gpu or "-",
        "node": row.node or "-",
        "tokens": row.tokens,
        "heads": row.q_heads,
        "KV": row.kv_heads,
        "busy s": _span(row.seconds) if row.seconds else "-",
        "memory GB": _memory(row.fullest, bar),
    }


def _memory(fullest: tuple[int, int] | None, bar: str) -> str:
    """Return the fullest rank's memory and what it may use, after a bar if it has characters."""
    if fullest is None:
        return "-"
    used, limit = fullest
    figures = f"{used / 1e9:.1f}/{limit / 1e9:.1f}"
    if not bar:
        return figures
    filled = min(BAR_CELLS, round(BAR_CELLS * used / limit))
    return f"{bar[0] * filled}{bar[1] * (BAR_CELLS - filled)} {figures}"


def baseline_table(plan: Plan) -> Table:
    """Return a table of the layouts the plan was compared with."""
    table = Table(title="baselines", **_PLAIN)
    table.add_column("layout", no_wrap=True)
    table.add_column("seconds a step", justify="right")
    table.add_column("the plan is")
    table.add_column("note")
    for name, baseline in plan.baselines.items():
        seconds = "-" if baseline.step_seconds is None else f"{baseline.step_seconds:.4g}"
        note = [] if baseline.executable else ["not executable here"]
        note += [baseline.reason] if baseline.reason else []
        table.add_row(name, seconds, _comparison(plan, baseline), "; ".join(note))
    return table


def _comparison(plan: Plan, baseline: BaselineResult) -> str:
    """Return how many times faster or slower the plan is."""
    if baseline.step_seconds is None or plan.predicted is None:
        return "-"
    ratio = baseline.step_seconds / plan.predicted.step_seconds
    return f"{ratio:.2f}x faster" if ratio >= 1 else f"{1 / ratio:.2f}x slower"


def terms_tables(plan: Plan, terms: Terms) -> list[Table]:
    """Return tables of what a step's seconds consist of, with a column a rank or alike ranks."""
    rows = [row for section in plan_sections(plan) for row in section.rows]
    tables = []
    for chunk in _batched(rows, RANKS_A_TABLE):
        table = Table(title="seconds in one step", **_PLAIN)
        table.add_column("rank")
        for row in chunk:
            table.add_column(f"{row.ranks}\n{row.gpu or '-'}", justify="right")
        for name, seconds in terms.items():
            ranks = ([share.rank for share in row.shares] for row in chunk)
            table.add_row(name, *(_span(seconds[members]) for members in ranks))
        tables.append(table)
    return tables


def _batched(rows: Sequence[Row], size: int) -> Iterator[Sequence[Row]]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def step_line(cost: Cost) -> str:
    """Return the sum that makes a step."""
    problem = cost.problem
    forward, backward = cost.layer_seconds
    return (
        f"step {cost.step_seconds:.4g} s = {cost.layout.accumulation} x ({problem.model.layers} "
        f"layers x (forward {forward:.4g} + backward {backward:.4g}) + logits "
        f"{cost.logits_seconds.max():.4g} + FSDP outside layers {boundary_seconds(problem):.4g}) + "
        f"optimizer {optimizer_seconds(problem).max():.4g}"
    )


def bound_line(bound: Bound) -> str:
    """Return the lower bounds, the one that binds first."""
    names = {
        "layers": f"all computing on all GPUs, FSDP beside it, {bound.layers:.4g} s",
        "heads": f"with whole heads {bound.heads:.4g} s",
        "cut": f"rows that must enter GPUs or nodes {bound.cut:.4g} s",
    }
    others = [
        text for name, text in names.items() if name != bound.binding and getattr(bound, name)
    ]
    passes = f"memory asks for {bound.passes} pass{'es' if bound.passes > 1 else ''}"
    return f"bounds: {names[bound.binding]} binds; {', '.join([*others, passes])}"


def certificate_line(certificates: Sequence[Certificate]) -> str:
    """Return what the solver proved of the splits inside the groups."""
    worst = max(certificates, key=lambda certificate: certificate.gap)
    return (
        f"certified by CBC: no split of any of {counted(len(certificates), 'group')}, each with "
        f"its tokens held, is faster by more than {max(worst.gap, 0.0):.2%} (replica "
        f"{worst.replica}, its group {worst.group})"
    )


def _span(values: Floats | Sequence[float]) -> str:
    """Return least and most, or one number where they look alike; rounding errors are 0."""
    ends = (round(value, 12) + 0.0 for value in (min(values), max(values)))
    return "-".join(dict.fromkeys(f"{end:.3g}" for end in ends))
