"""Compile a kernel for a card that need not be here, and read what the binary takes.

Registers come from the resource report, spills from the machine code: each store to local memory
counts with its width. A *hot loop* is an innermost loop with tensor-core instructions.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

BINARIES = Path(triton.__file__).parent / "backends/nvidia/bin"

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?);")
_JUMP = re.compile(r"\bBRA(?:\.\w+)* (?:\S+, )?0x([0-9a-f]+)")
_SPILL = re.compile(r"\b(?:STL|LDL)\b")
_SPILL_STORE = re.compile(r"\bSTL(\.64|\.128|)\b")
_TENSOR_CORE = re.compile(r"\b(?:HGMMA|HMMA)\b")
_WIDTHS = {"": 4, ".64": 8, ".128": 16}


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes: a thread's registers and spills, a program's shared memory."""

    registers: int
    spill_store_bytes: int
    spills_in_hot_loops: int
    shared_bytes: int


def compile_for(
    arch: str,
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    num_warps: int,
    num_stages: int,
) -> Resources:
    """Compile `kernel` and read its resources.

    Args:
        arch: the card's architecture, as "sm_90".
        kernel: a Triton kernel.
        types: the types of its arguments, as "*bf16"; those left out are i32.
        constants: the values of compile-time arguments; those it does not have are ignored.
        num_warps: warps of a program.
        num_stages: pipeline stages of its loops.
    """
    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            values[(i,)] = constants[name]
            continue
        signature[name] = types.get(name, "i32")
        if signature[name].startswith("*") or name.startswith("stride"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(kernel, signature, values, attributes),
        target=GPUTarget("cuda", int(arch.removeprefix("sm_")), 32),
        options={"num_warps": num_warps, "num_stages": num_stages},
    )
    return resources_of(compiled)


def resources_of(compiled: Any) -> Resources:
    """Read the resources of a compiled kernel from its binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = _cuobjdump("-res-usage", cubin.name)
        code = _INSTRUCTION.findall(_cuobjdump("-sass", cubin.name))
    registers = re.search(r"REG:(\d+)", usage)
    assert registers, usage
    stores = [match[1] for _, text in code if (match := _SPILL_STORE.search(text))]
    return Resources(
        int(registers[1]),
        sum(_WIDTHS[width] for width in stores),
        spills_in_hot_loops(code),
        compiled.metadata.shared,
    )


def spills_in_hot_loops(code: list[tuple[str, str]]) -> int:
    """Return how many instructions of hot loops touch local memory."""
    places = [(int(at, 16), text) for at, text in code]
    products = [at for at, text in places if _TENSOR_CORE.search(text)]
    jumps = [
        (int(to[1], 16), at)
        for i, (at, text) in enumerate(places)
        if (to := _JUMP.search(text))
        and "TRYWAIT" not in places[max(i - 2, 0)][1]  # back from waiting at a barrier: no loop
    ]
    loops = [(a, b) for a, b in jumps if a < b and any(a <= at <= b for at in products)]
    hot = [
        (a, b)
        for a, b in loops
        if not any((c, d) != (a, b) and a <= c and d <= b for c, d in loops)
    ]
    spills = {at for at, text in places if _SPILL.search(text)}
    return sum(any(a <= at <= b for a, b in hot) for at in spills)


def _cuobjdump(*args: str) -> str:
    return subprocess.run(
        [str(BINARIES / "cuobjdump"), *args], capture_output=True, text=True, check=True
    ).stdout
