"""`hexiseq tune`: what is measured, who wins, and that the kernels then read the outcome."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kernel_runs  # chooses Triton's interpreter where there is no GPU
import pytest
import torch
from rich.console import Console
from triton.runtime.errors import OutOfResources
from typer.testing import CliRunner

from hexiseq_triton.cli import app
from hexiseq_triton.commands.tune import choice_table, tune_command
from hexiseq_triton.errors import HexiSeqError
from hexiseq_triton.kernels import AttentionOptions, HeadMap, tune
from hexiseq_triton.kernels.backward import attention_backward
from hexiseq_triton.kernels.configs import Config
from hexiseq_triton.kernels.delta import row_dots
from hexiseq_triton.kernels.forward import attention_forward
from hexiseq_triton.kernels.launch_tables import INTERPRETED
from hexiseq_triton.kernels.tune import Choice, Size, Task, candidates, choose, medians
from hexiseq_triton.kernels.tune_problem import Problem
from hexiseq_triton.kernels.user_tables import (
    PATH_VARIABLE,
    Card,
    choices_for,
    load_sections,
    save_section,
)
from hexiseq_triton.segments import CAUSAL, whole_documents

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

DOCS = Path(__file__).resolve().parent.parent / "docs" / "tuning.md"
ADA = Card("Some Card", "sm_89", 101376, "3.6.0")
HOPPER = Card("Other Card", "sm_90", 232448, "3.6.0")
A, B, C, D = (Config(16 << i, 64, 4, 2) for i in range(4))
TASK = Task("forward", 128, (A, B, C, D))


@pytest.mark.parametrize("card", [ADA, HOPPER], ids=["sm_89", "sm_90"])
@pytest.mark.parametrize(
    ("name", "head_dim"), {(name, d): None for name, table in tune.TABLES.items() for _, d in table}
)
def test_the_list_is_short_and_begins_with_the_present_choice(
    name: Any, head_dim: Any, card: Card
) -> None:
    present = Config(16, 16, 2, 1)
    found = candidates(name, head_dim, card, present)
    assert found[0] == present
    assert len(set(found)) == len(found) <= 8
    assert all(config.descriptors == card.has_descriptors for config in found[1:])


def test_the_least_median_wins() -> None:
    assert choose(TASK, {A: 3.0, B: 2.0, C: 2.5}).config == B


def test_noise_does_not_replace_the_present_choice() -> None:
    assert choose(TASK, {A: 1.0, B: 0.991}).config == A
    assert choose(TASK, {A: 1.0, B: 0.989}).config == B


def test_a_present_choice_that_does_not_run_is_replaced() -> None:
    choice = choose(TASK, {B: 2.0, C: 2.1})
    assert (choice.config, choice.milliseconds, choice.milliseconds_before) == (B, 2.0, None)


def test_a_card_on_which_nothing_runs_is_named() -> None:
    with pytest.raises(HexiSeqError, match="forward, head dimension 128: none of 4 launch choices"):
        choose(TASK, {})


def test_launches_run_in_turns_and_one_slow_round_does_not_decide() -> None:
    order: list[str] = []
    launches = {
        config: (lambda name=name: order.append(name)) for config, name in ((A, "a"), (B, "b"))
    }

    def clock(launch: Callable[[], None]) -> float:
        launch()
        slow_round = len(order) in (1, 2)
        return (100.0 if slow_round else 1.0) + (order[-1] == "b")

    assert medians(launches, clock, seconds=0.0) == {A: 1.0, B: 2.0}
    assert order == ["a", "b"] * tune.LEAST_ROUNDS


class FakeLaunch:
    """A launch that costs what its blocks say, does not fit, or spills."""

    running: Config

    def __init__(self, config: Config) -> None:
        self.config = config
        self.num_spills = int(config.num_stages == 3)

    def __call__(self) -> None:
        if self.config.block_m * self.config.block_n > 64 * 64:
            raise OutOfResources(1, 0, "shared memory")
        FakeLaunch.running = self.config


class FakeProblem:
    def __init__(self, head_dim: int, num_tokens: int, device: torch.device) -> None:
        self.q = torch.empty(num_tokens, 1, head_dim)

    def prepare(self, table: str, config: Config) -> tuple[FakeLaunch, FakeLaunch]:
        launch = FakeLaunch(config)
        return launch, launch


def clock(launch: Callable[[], None]) -> float:
    launch()
    return 1e4 / (FakeLaunch.running.block_m * FakeLaunch.running.block_n)


def test_a_whole_run_writes_what_the_kernels_then_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tune, "Problem", FakeProblem)
    cpu, size, path = torch.device("cpu"), Size(8, 0.0, (64, 128)), tmp_path / "t.yaml"
    tasks = [
        Task(name, head_dim, candidates(name, head_dim, ADA, Config(16, 16, 4, 3)))
        for head_dim in size.head_dims
        for name in tune.TABLES
    ]
    choices = list(tune.tune(tasks, size, cpu, clock))

    for choice in choices:
        fitting = [c for c in choice.task.candidates if c.block_m * c.block_n <= 64 * 64]
        assert set(choice.medians) == {c for c in fitting if c.num_stages < 3} | {fitting[0]}
        largest = max(choice.medians, key=lambda c: c.block_m * c.block_n)
        assert choice.milliseconds == choice.medians[largest]
    save_section(tune.section_of(ADA, choices), path)
    read = choices_for(ADA, load_sections(path), path)
    assert read == {(c.task.table, c.task.head_dim): c.config for c in choices}


def test_the_present_choice_is_what_the_kernels_would_take() -> None:
    size = Size(8, 0.0, (128,), most_candidates=3)
    tasks = tune.tasks_for(ADA, size, torch.device("cpu"))
    assert [(task.table, task.head_dim) for task in tasks] == [(n, 128) for n in tune.TABLES]
    assert all(task.candidates[0] == INTERPRETED for task in tasks)
    assert all(len(task.candidates) == 3 for task in tasks)


def test_a_problem_runs_the_kernels_themselves() -> None:
    torch.manual_seed(0)
    problem = Problem(64, 70, torch.device(kernel_runs.DEVICE), num_heads=2, num_kv_heads=1)
    for name in tune.TABLES:
        _, run = problem.prepare(name, Config(32, 32, 4, 1))
        run()

    q, k, v, do = problem.q, problem.k, problem.v, problem.do
    segments = tuple(whole_documents([70]))
    call = (segments, segments, HeadMap(0, 2), AttentionOptions(CAUSAL, 64**-0.5))
    out, dq, dk, dv = (torch.empty_like(x) for x in (q, q, k, v))
    lse = torch.empty_like(problem.lse)
    attention_forward(q, k, v, None, lse, *call, first=True, out=out)
    delta = row_dots(do, out)
    attention_backward(q, k, v, do, lse, delta, dq, dk, dv, *call, accumulate=False)
    pairs = (
        (problem.out, out),
        (problem.dq, dq),
        (problem.dk, dk),
        (problem.dv, dv),
    )
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=0.03, atol=0.03)


def test_the_table_shows_what_changed() -> None:
    console = Console(record=True, width=200)
    console.print(choice_table("Some Card", [Choice(TASK, B, {A: 3.0, B: 2.0})]))
    assert re.search(
        r"forward .* 128 .* 32x64, 4 warps, 2 stages .* 2\.000 .* 3\.000 .* 2 of 4",
        console.export_text(),
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_a_file_of_something_else_is_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # then what it names is missing
    other = tmp_path / "cluster.yaml"
    other.write_text("nodes: []", encoding="utf-8")
    for path, says in ((other, "nodes is no field here"), (tmp_path, "which is a folder")):
        result = CliRunner().invoke(app, ["tune", "--out", str(path)])
        assert result.exit_code == 2
        assert says in result.stderr


def test_without_a_gpu_the_command_says_so() -> None:
    result = CliRunner().invoke(app, ["tune"])
    assert result.exit_code == 2
    assert "hexiseq tune measures kernels on an NVIDIA GPU; PyTorch finds none" in result.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_quick_run_on_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path / "t.yaml"))
    tune_command(quick=True)
    (section,) = load_sections(tmp_path / "t.yaml")
    assert section.measured_on == Card.of(torch.device("cuda", torch.cuda.current_device()))
    assert all(entries[128].milliseconds > 0 for entries in section.tables.values())


def test_the_documented_file_is_read(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    path = tmp_path / "t.yaml"
    path.write_text(example)
    (section,) = load_sections(path)
    read = choices_for(section.measured_on, [section], path)
    assert read["forward", 64] == Config(128, 64, 8, 2)
    assert set(section.tables) == set(tune.TABLES)


def test_the_documentation_names_the_variable_and_the_figures() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert f"${PATH_VARIABLE}" in text
    for number in (tune.FULL.num_tokens, tune.QUICK.num_tokens):
        assert f"{number:,} tokens" in text
    assert tune.QUICK.head_dims == (128,)
    assert tune.NOISE == 0.01
