"""Kernels compile for every card without a GPU, and keep their values in registers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"
CARDS = ("sm_80", "sm_86", "sm_89", "sm_90")
LOOP = [
    ("0000", "MOV R1, R2 "),
    ("0010", "HGMMA.64x64x16.F32.BF16 R24 "),
    ("0020", "@P0 BRA 0x10 "),
]


def test_a_covering_set_compiles_without_spills() -> None:
    """`make compile-all` does the same for every entry, with every optional feature."""
    command = [sys.executable, str(BENCH / "compile_all.py"), "--covering"]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}  # its own process: compiled, not run
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    for kernel in ("forward", "grad_kv", "grad_q", "delta", "pack", "unpack", "add"):
        for card in CARDS:
            assert f"{kernel:9}{card:7}" in done.stdout


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (LOOP, 0),
        ([("0000", "STL [R1], R2 "), *LOOP[1:]], 0),
        ([*LOOP[:2], ("0018", "LDL.LU R4, [R1] "), LOOP[2]], 1),
        ([LOOP[0], ("0010", "FADD R1, R2, R3 "), ("0018", "STL [R1], R2 "), LOOP[2]], 0),
    ],
    ids=["none", "before the loop", "in the loop", "in a loop without products"],
)
def test_spills_in_hot_loops_are_counted(
    code: list[tuple[str, str]], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    from compiled import spills_in_hot_loops

    assert spills_in_hot_loops(code) == expected
