"""docs/add-a-gpu.md does what it says: its files are written, its commands and code are run."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hexiseq_triton.cli import app
from hexiseq_triton.planner.plans import Plan

PAGE = Path(__file__).parents[1] / "docs" / "add-a-gpu.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def hexiseq(line: str) -> str:
    words = shlex.split(line)
    assert words[0] == "hexiseq"
    result = CliRunner(env={"COLUMNS": "400"}).invoke(app, words[1:])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def run_python(code: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, str(PAGE), "exec"), {})
    return printed.getvalue()


def test_the_page_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert {kind for kind, _ in blocks} == {"", "yaml", "bash", "python", "text"}
    output = ""
    for kind, content in blocks:
        if kind in ("", "yaml"):
            name = content.splitlines()[0].removeprefix("# ")
            Path(name).write_text(content, encoding="utf-8")
        elif kind == "bash":
            output = "\n".join(hexiseq(line) for line in content.splitlines())
        elif kind == "python":
            assert "'intra_gb_per_s': 25" in run_python(content)
        else:
            printed = " ".join(re.sub(r"[│┃]", " ", output).split())
            for expected in _sentences(content):
                assert " ".join(expected.split()) in printed
            if content.startswith("# "):  # a file, which is used as it stands
                assert content == output

    used = {share.gpu for share in Plan.load("plan.json").shares}
    assert used == {"H100-SXM", "acme-x1"}


def _sentences(text: str) -> list[str]:
    """Return the lines, those joined that the page breaks after a comma."""
    return re.sub(r",\s*\n", ", ", text).splitlines()
