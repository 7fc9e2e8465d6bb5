"""Kernels compile for every card without a GPU, and keep their values in registers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "bench" / "compile_all.py"


@pytest.mark.parametrize("card", ["sm_80", "sm_86", "sm_89", "sm_90"])
def test_entries_of_head_dimension_128_compile_without_spills(card: str) -> None:
    """`make compile-all` does the same for every entry and for the optional features."""
    command = [sys.executable, str(SCRIPT), "--only", card, "--head-dim", "128"]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}  # its own process: compiled, not run
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(card) == 4
