"""The guide's pages run as written: their files are written and their commands run, in order."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ON_THE_CPU = {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


def run_page(page: Path, folder: Path) -> str:
    """Write the files of a page, whose first line names them; run its commands; return output."""
    printed = ""
    for kind, content in BLOCK.findall(page.read_text(encoding="utf-8")):
        if kind == "bash":
            for line in content.splitlines():
                printed += run(line, folder)
        else:
            name = content.splitlines()[0].removeprefix("# ")
            (folder / name).write_text(content, encoding="utf-8")
    return printed


def run(line: str, folder: Path) -> str:
    ran = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=os.environ | ON_THE_CPU,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, f"{line}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


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
