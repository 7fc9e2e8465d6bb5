"""No command overwrites a file that it reads, or writes one file twice."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hexiseq_triton.cli import _Command, app

READ = ("cluster.yaml", "plan.json", "train.yaml", "model.yaml", "gpus.yaml")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: files that say their names, and another name for one of them."""
    for name in READ:
        (tmp_path / name).write_text(name, encoding="utf-8")
    (tmp_path / "link").symlink_to("cluster.yaml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


PLAN = "plan --cluster cluster.yaml --model model.yaml --gpus gpus.yaml --seq-len 4096"
SIMULATE = "simulate --plan plan.json --cluster cluster.yaml --model tiny"
WHATIF = "whatif --cluster cluster.yaml --model tiny --seq-len 4096"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{PLAN} --out cluster.yaml", "--out is cluster.yaml, which --cluster reads too; name"),
        (f"{PLAN} --out ../{{}}/model.yaml", "which --model reads too"),
        (f"{PLAN} --report gpus.yaml", "which --gpus reads too; name another file for --report"),
        (f"{PLAN} --out new --report ./new", "which --report writes too"),
        (f"{SIMULATE} --trace new --report new", "which --report writes too"),
        (f"{SIMULATE} --plots new --report new", "which --report writes too"),
        (f"{WHATIF} --plot link", "--plot is link, which --cluster reads too"),
        ("launch --plan plan.json --hosts a --sbatch plan.json", "which --plan reads too"),
        ("launch --plan plan.json --hosts a --sbatch train.yaml", "which --config reads too"),
        ("train --plan plan.json --config train.yaml --trace plan.json", "which --plan reads too"),
        ("profile --model model.yaml --out model.yaml", "which --model reads too"),
        ("reproduce --out new --page new", "which --page writes too"),
    ],
)
def test_a_file_that_is_read_or_written_already_is_refused(
    folder: Path, line: str, message: str
) -> None:
    words = shlex.split(line.format(folder.name))
    for rank in ("0", "1"):  # every rank sees it, and says so
        result = CliRunner(env={"RANK": rank}).invoke(app, words)
        assert result.exit_code == 2
        assert message in result.stderr
    assert [(folder / name).read_text("utf-8") for name in READ] == list(READ)
    assert not (folder / "new").exists()


def test_what_is_thrown_away_may_be_written_twice(folder: Path) -> None:
    result = CliRunner().invoke(app, [*PLAN.split(), "--out", "/dev/null", "--report", "/dev/null"])
    assert "gpus.yaml" in result.stderr  # which is no file of GPUs
    assert "/dev/null" not in result.stderr


def test_every_command_is_checked() -> None:
    assert {each.cls for each in app.registered_commands} == {_Command}
