"""The guide's pages run as written: their files are written and their commands run, in order."""

from __future__ import annotations

import re
from pathlib import Path

import commands
import pytest
from commands import ROOT, blocks, lines

DOCS = ROOT / "docs"
PAGES = sorted(page.name for page in DOCS.glob("*.md"))
RUN = ("index", "packed-data", "pytorch", "huggingface", "other-stacks", "whatif", "tuning")
RUN_ELSEWHERE = ("add-a-gpu",)
"""Pages that another file runs: test_add_a_gpu.py."""


def run_page(page: Path, folder: Path) -> str:
    """Write the files of a page, whose first line names them; run its commands; return output."""
    printed = ""
    for kind, content in blocks(page):
        if kind == "bash":
            printed += "".join(commands.run(line, folder) for line in lines(content))
        else:
            name = content.splitlines()[0].removeprefix("# ")
            (folder / name).write_text(content, encoding="utf-8")
    return printed


def test_ten_minutes(tmp_path: Path) -> None:
    printed = run_page(DOCS / "index.md", tmp_path)
    rows = [int(found) for found in re.findall(r"rank \d: \((\d+), 8, 16\)", printed)]
    assert len(rows) == 4
    assert sum(rows) == 4096
    assert (tmp_path / "train_out" / "metrics.jsonl").exists()


def test_packed_documents(tmp_path: Path) -> None:
    run_page(DOCS / "packed-data.md", tmp_path)  # the page's own assertions


def test_plain_pytorch(tmp_path: Path) -> None:
    printed = run_page(DOCS / "pytorch.md", tmp_path)
    losses = re.findall(r"rank \d: loss ([\d.]+)", printed)
    assert len(losses) == 3
    assert len(set(losses)) == 1


def test_hugging_face(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")  # which brings transformers' Trainer to life
    printed = run_page(DOCS / "huggingface.md", tmp_path)
    losses = re.findall(r"rank \d: loss ([\d.]+)", printed)
    assert len(losses) == 6
    assert len(set(losses)) == 2


def test_other_stacks(tmp_path: Path) -> None:
    printed = run_page(DOCS / "other-stacks.md", tmp_path)
    rows = re.findall(r"rank (\d): \(([\d, ]+)\)", printed)
    assert sorted(rows) == [
        ("0", "1, 900, 8, 16"),
        ("0", "900, 128"),
        ("1", "1, 300, 8, 16"),
        ("1", "300, 128"),
        ("2", "1, 848, 8, 16"),
        ("2", "848, 128"),
    ]


def test_what_to_buy(tmp_path: Path) -> None:
    printed = run_page(DOCS / "whatif.md", tmp_path)
    for variant in ("as it is", "+ 8xH100, bandwidth x2", "without slow"):
        assert variant in printed
    assert (tmp_path / "frontier.png").exists()


def test_a_rehearsal_on_a_cpu(tmp_path: Path) -> None:
    example = (ROOT / "examples" / "train.yaml").read_text(encoding="utf-8")
    few_steps = example.replace("steps: 200", "steps: 3", 1)
    assert few_steps != example
    (tmp_path / "train.yaml").write_text(few_steps, encoding="utf-8")
    _, page = (DOCS / "mixed-cluster.md").read_text("utf-8").split("## A rehearsal on a CPU")
    (_, content), *_ = commands.BLOCK.findall(page)
    printed = "".join(commands.run(line, tmp_path) for line in lines(content))
    assert "written to cluster.yaml" in printed
    assert "--nproc-per-node=4" in printed
    assert "measured, fastest first: " in printed
    assert (tmp_path / "trace.json").exists()


def test_tuning(tmp_path: Path) -> None:
    (_, command), (kind, table) = blocks(DOCS / "tuning.md")
    commands.parse(command)
    assert kind == "yaml"
    from hexiseq_triton.kernels.user_tables import load_sections  # Triton only when kernels run

    path = tmp_path / "launch_tables.yaml"
    path.write_text(table, encoding="utf-8")
    (section,) = load_sections(path)
    assert sorted(section.tables) == ["forward", "grad_kv", "grad_q"]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_runs_or_is_a_command_that_exists(page: str) -> None:
    """Pages that need GPUs have commands alone; `text` is what commands print."""
    for kind, content in blocks(DOCS / page):
        if kind in ("bash", ""):
            names_a_file = content.startswith("# ")
            for line in () if names_a_file else lines(content):
                commands.parse(line)
        elif kind != "text":
            assert page.removesuffix(".md") in (*RUN, *RUN_ELSEWHERE)


@pytest.fixture(scope="module")
def sources() -> str:
    folders = ("hexiseq_triton", "planner", "kernels")
    files = (file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    joined = "".join(file.read_text(encoding="utf-8") for file in files)
    return re.sub(r'"\s*f?"', "", joined)  # strings that a line break cuts


def test_every_message_of_the_error_page_exists(sources: str) -> None:
    page = (DOCS / "errors.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `([^`]+)`", page, re.MULTILINE)
    assert len(messages) > 5
    for message in messages:
        assert message in sources


def test_every_page_is_in_the_site() -> None:
    listed = re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in DOCS.glob("*.md"))


def test_every_link_leads_to_a_file() -> None:
    for page in (ROOT / "README.md", *DOCS.glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"
