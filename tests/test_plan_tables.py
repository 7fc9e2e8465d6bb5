"""How a plan is shown: rows of ranks, remarks, comparisons, and the page with plots."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.plans import (
    BaselineResult,
    GroupPlan,
    Plan,
    Prediction,
    RankShare,
    ReplicaPlan,
    Split,
)
from hexiseq_triton.reports.plan_report import write_report
from hexiseq_triton.reports.plan_rows import plan_sections, spans
from hexiseq_triton.reports.plan_tables import (
    assumed_lines,
    baseline_table,
    plan_table,
    print_plan,
    summary_lines,
    terms_tables,
)
from hexiseq_triton.reports.terminal import print_table, terminal

CLUSTER = Cluster.from_mapping(
    {
        "nodes": [{"name": "a", "gpus": ["fast", "slow"], "intra_gb_per_s": 9}],
        "gpus": {
            "fast": {"dense_tflops": 10, "memory_gb": 12, "network_gb_per_s": 2},
            "slow": {"dense_tflops": 5, "memory_gb": 8, "network_gb_per_s": 2},
        },
    }
)


def share(rank: int, gpu: str, tokens: int, heads: tuple[int, int]) -> RankShare:
    kv_heads = (heads[0] // 2, -(-heads[1] // 2))
    return RankShare(
        rank, tokens, heads, kv_heads, gpu, f"{gpu}-node", 3 * 10**9, 4 * 10**9, 0.5 + tokens / 1e4
    )


def plan_of(num_groups: int, idle: int = 0) -> Plan:
    """Return replicas of one group each, of a fast rank and a slow one."""
    replicas = tuple(
        ReplicaPlan(
            (
                GroupPlan(
                    (
                        share(2 * g, "fast", 700 + g % 2, (0, 3)),
                        share(2 * g + 1, "slow", 300 - g % 2, (3, 4)),
                    )
                ),
            )
        )
        for g in range(num_groups)
    )
    plan = Plan(
        world_size=2 * num_groups + idle,
        seq_len=1000,
        num_heads=4,
        num_kv_heads=2,
        replicas=replicas,
        strategy="hexiseq: pairs",
        predicted=Prediction(2.0, 500.0),
        lower_bound_seconds=1.6,
        gap=0.25,
        gap_parts={"grouping": 0.1, "rounding": 0.15},
        notes=("heuristic: the documents differ",),
        baselines={
            "ring": BaselineResult(3.0),
            "double_ring": BaselineResult(1.0, executable=False),
            "ulysses": BaselineResult(None, "4 query heads do not divide by 9 ranks"),
        },
    )
    plan.validate()
    return plan


def shown(*tables: Table) -> str:
    console = Console(width=100, file=io.StringIO())
    for table in tables:
        console.print(table)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_small_plans_have_a_row_a_rank() -> None:
    sections = plan_sections(plan_of(2))

    assert [[row.ranks for row in section.rows] for section in sections] == [["0", "1"], ["2", "3"]]
    text = shown(plan_table(plan_of(2)))
    for word in ("fast-node", "[0, 3)", "[3, 4)", "[0, 2)", "701", "0.57", "███", "3.0/4.0"):
        assert word in text


def test_large_plans_have_a_row_for_alike_ranks() -> None:
    plan = plan_of(512)
    (section,) = plan_sections(plan)

    assert (len(section.groups), len(section.replicas)) == (512, 512)
    assert [row.tokens for row in section.rows] == ["700-701", "299-300"]
    assert sum(len(row.shares) for row in section.rows) == 1024
    text = shown(plan_table(plan))
    assert len(text.splitlines()) < 12
    for word in ("x512", "0-511", "0, 2, 4, 6, 508 more", "700-701"):
        assert word in text


def test_groups_of_other_makeup_stay_apart() -> None:
    plan = plan_of(20)
    lone = GroupPlan((share(40, "slow", 1000, (0, 4)),))
    plan = replace(plan, world_size=41, replicas=(*plan.replicas, ReplicaPlan((lone,))))

    first, second = plan_sections(plan)
    assert (len(first.groups), second.groups, second.replicas) == (20, (20,), (20,))


def test_idle_ranks_are_named() -> None:
    assert "idle: ranks 4-6" in shown(plan_table(plan_of(2, idle=3)))
    assert "idle" not in shown(plan_table(plan_of(2)))


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([3], "3"),
        ([4, 1, 2, 3], "1-4"),
        ([0, 2, 3], "0, 2-3"),
        (range(0, 12, 2), "0, 2, 4, 6, 2 more"),
    ],
)
def test_spans(numbers: list[int], text: str) -> None:
    assert spans(numbers) == text


def test_baselines_say_how_much_slower_or_faster_they_are() -> None:
    lines = shown(baseline_table(plan_of(1))).splitlines()
    rows = {line.split()[0]: line for line in lines if line.strip()}

    assert "1.50x faster" in rows["ring"]
    assert "2.00x slower" in rows["double_ring"]
    assert "not executable here" in rows["double_ring"]
    assert "do not divide" in rows["ulysses"]


def test_the_summary_has_bound_gap_parts_and_notes() -> None:
    console = Console(width=200, file=io.StringIO())
    print_plan(plan_of(1), console)

    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "passes a step: 1; sequences a pass: 1 in replica 0\n" in text
    assert "2 s a step, 500 tokens/s" in text
    assert "faster than 1.6 s: gap 25.0% (grouping 10.0%, rounding 15.0%)" in text
    assert "heuristic: the documents differ" in text


def test_uneven_sequences_are_listed_by_replica() -> None:
    plan = plan_of(3)
    uneven = replace(plan, replicas=(replace(plan.replicas[0], sequences=2), *plan.replicas[1:]))

    assert "2 in replica 0, 1 in replicas 1-2" in summary_lines(uneven)[0]


def test_assumed_figures_are_listed_by_gpu() -> None:
    lines = assumed_lines(CLUSTER)

    assert [line.split(":")[0] for line in lines] == ["assumed of fast", "assumed of slow"]
    assert "memory_gb_per_s 1000, efficiency.gemm 0.7" in lines[0]
    assert "intra_gb_per_s" not in lines[0]  # the file gives it


TERMS = {
    "forward attention": np.array([0.5, 1.0]),
    "wait for logits": np.array([0.25, 0.0]),
    "FSDP outside layers": np.array([1.25, 1.0]),
}


def test_terms_have_a_column_a_rank() -> None:
    text = shown(*terms_tables(plan_of(1), TERMS))

    assert re.search(r"forward attention +0.5 +1\b", text)
    assert re.search(r"FSDP outside layers +1.25 +1\b", text)


class Page(HTMLParser):
    """What a browser would look at: which elements close, what is fetched, which ids there are."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            if name in ("src", "href", "xlink:href") and not str(value).startswith("#"):
                self.fetched.append(str(value))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("num_groups", [1, 128])
def test_the_report_is_one_page_that_needs_nothing_else(tmp_path: Path, num_groups: int) -> None:
    plan = replace(plan_of(num_groups), strategy="<hexiseq> & pairs")
    terms = {name: np.tile(seconds, num_groups) for name, seconds in TERMS.items()}
    write_report(tmp_path / "a.html", plan, CLUSTER, terms)
    write_report(tmp_path / "b.html", plan, CLUSTER, terms)
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    page = Page(text)

    assert (page.open, page.fetched) == ([], [])
    assert len(page.ids) == len(set(page.ids))
    assert text.count("<svg") == 3
    assert "&lt;hexiseq&gt; &amp; pairs" in text
    for word in ("query heads", "waiting", "limit", "not executable here", "efficiency.gemm"):
        assert word in text
    assert len(text) < 1_500_000
    assert (tmp_path / "b.html").read_text(encoding="utf-8") == text


def test_a_plan_by_hand_has_a_table_too() -> None:
    by_hand = Plan.from_splits([Split((5, 3), (1, 1))], [Split((8,), (2,))])
    text = shown(plan_table(by_hand))

    assert "by hand" in text
    assert re.search(r"^1 +1 +2 +- +- +8 +\[0, 2\) +- +-$", text, re.MULTILINE)


@pytest.mark.parametrize("width", [20, 40, 60, 200])
def test_a_narrow_terminal_cuts_no_number(width: int) -> None:
    table = Table()
    for name in ("layout", "note"):
        table.add_column(name)
    for name in ("seconds a step", "tokens a second"):
        table.add_column(name, justify="right")
    numbers = [f"{n:,} (+{n % 90}%)" for n in (123_456_789, 987_654_321_012)]
    table.add_row("loongtrain_context_first", "ranks 1000-1003, 10020-10023", *numbers)
    console = Console(file=io.StringIO(), width=width)
    print_table(table, console)

    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(whole in text for whole in (*numbers, "1000-1003", "10020-10023"))
    assert "…" not in text
    assert console.width == width


def test_names_keep_what_rich_takes_for_markup(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("of slow[old]", title="card[new]")
    table.add_row("rack:key:1[/a]")
    print_table(table, terminal())

    printed = capsys.readouterr().out
    assert all(name in printed for name in ("of slow[old]", "card[new]", "rack:key:1[/a]"))


def test_a_plan_in_a_narrow_terminal_keeps_its_numbers() -> None:
    texts = {}
    for width in (30, 90):
        console = Console(file=io.StringIO(), width=width)
        print_plan(plan_of(2), console)
        texts[width] = console.file.getvalue()  # type: ignore[attr-defined]

    assert re.findall(r"[\d.,]+", texts[30]) == re.findall(r"[\d.,]+", texts[90])
