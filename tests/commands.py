"""Documented command lines, run or only parsed.

They run in forked processes that have imported everything already: the same code as a fresh shell
would run, without the seconds that its imports take.
"""

from __future__ import annotations

import io
import os
import re
import runpy
import shlex
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
import typer
from pool import Pool
from torch.distributed.run import get_args_parser

from hexiseq_triton.cli import app

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return the language and the content of each code block of a page."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def lines(content: str) -> list[str]:
    """Return a shell block's commands, those joined that go on in the next line."""
    return content.replace("\\\n", " ").splitlines()


# -------------------------------------------------------------------- run


def run(line: str, folder: Path) -> str:
    """Run `hexiseq`, `python` or `torchrun` in a folder; return what it prints, rank by rank."""
    words = shlex.split(line, comments=True)
    num_ranks = 1
    if words[0] == "torchrun":
        launched = get_args_parser().parse_args(words[1:])
        num_ranks = int(launched.nproc_per_node)
        words = [launched.training_script, *launched.training_script_args]
    elif words[0] == "python":
        words = words[1:]
    worker = command if words[0] == "hexiseq" else script
    with Pool(num_ranks) as pool:
        return "".join(pool.run(worker, str(folder), *words))


def command(rank: int, folder: str, *words: str) -> str:
    """Worker: run a `hexiseq` command line."""
    in_a_world(rank)
    os.chdir(folder)
    with redirect_stdout(io.StringIO()) as printed:
        code = app(words[1:], standalone_mode=False)
    if code:
        raise RuntimeError(f"{shlex.join(words)} ended with exit code {code}")
    return printed.getvalue()


def script(rank: int, folder: str, *words: str) -> str:
    """Worker: run a Python file as a script."""
    in_a_world(rank)
    os.chdir(folder)
    sys.argv = list(words)
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(words[0], run_name="__main__")
    return printed.getvalue()


def in_a_world(rank: int) -> None:
    """Worker: set what torchrun would tell."""
    size = torch.distributed.get_world_size()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    values = (rank, rank, size, size, "127.0.0.1", 1)
    os.environ |= {name: str(value) for name, value in zip(names, values, strict=True)}
    warnings.simplefilter("ignore")


# -------------------------------------------------------------------- parse


def parse(line: str) -> None:
    """Raise if a command line names a command, an option or a target that does not exist."""
    words = shlex.split(line.replace("[", "").replace("]", ""), comments=True)
    if words[0] == "torchrun":
        launched = get_args_parser().parse_args(words[1:])
        words = [launched.training_script, *launched.training_script_args]
    if words[0] == "make":
        rules = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert re.search(rf"^{words[1]}:", rules, re.MULTILINE), f"no target: {line}"
    elif words[0] == "hexiseq":
        found: Any = typer.main.get_command(app)
        context = found.make_context("hexiseq", words[1:2], resilient_parsing=True)
        rest = words[1:]
        while hasattr(found, "resolve_command"):
            name, found, rest = found.resolve_command(context, rest)
        found.make_context(name, rest, parent=context)
    else:
        assert words[0].endswith(".py") or words[0] == "python", f"unknown program: {line}"
