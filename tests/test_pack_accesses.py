"""Pack and unpack move 16 bytes at an access, on every card; compiled here without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COMPILE = """
import re, sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hexiseq_triton.kernels.pack import BLOCK_BYTES, NUM_WARPS, _move_kernel as kernel

arch, unpack, interleaved, half = (int(number) for number in sys.argv[1:])
constants = {
    "UNPACK": bool(unpack), "INTERLEAVED": bool(interleaved), "ROWS": BLOCK_BYTES // 256,
    "D": 128, "PAD": 128, "HALF": half, "HALF_PAD": max(1, half), "REST_PAD": 128 - 2 * half or 1,
    "stride_cosd": 1, "stride_sind": 1,
}
types = dict.fromkeys(("x0", "x1", "x2", "away", "own"), "*bf16")
types |= {"cos": "*fp32", "sin": "*fp32", "chunks": "*i64", "places": "*i64"}
types |= dict.fromkeys(constants, "constexpr")
signature = {name: types.get(name, "i32") for name in kernel.arg_names}
aligned = [
    (i,) for i, name in enumerate(kernel.arg_names)
    if signature[name].startswith("*") or (name.startswith("stride") and name not in constants)
]
values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
source = ASTSource(kernel, signature, values, {at: [["tt.divisibility", 16]] for at in aligned})
options = {"num_warps": NUM_WARPS}
compiled = compile(source, target=GPUTarget("cuda", arch, 32), options=options)
print(*re.findall(r"(?:ld|st)[.]global[.]([.a-z0-9]+)", compiled.asm["ptx"]))
"""


@pytest.mark.parametrize(
    ("arch", "unpack", "interleaved", "half"),
    [(80, 0, 0, 64), (90, 1, 1, 32)],
    ids=["sm_80 pack, halves", "sm_90 unpack, some pairs"],
)
def test_every_access_to_heads_has_16_bytes(
    arch: int, unpack: int, interleaved: int, half: int
) -> None:
    numbers = [str(number) for number in (arch, unpack, interleaved, half)]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}  # its own process: compiled, not run
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, *numbers],
        capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    widths = done.stdout.split()
    assert set(widths) == {"v4.b32", "b64"}, widths  # b64: the tables of chunks and places
    assert widths.count("v4.b32") >= 8
