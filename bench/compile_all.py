"""Cross-compile every launch-table entry, without a GPU, and read registers and spills.

    python bench/compile_all.py [--only sm_90] [--head-dim 128] [--features] [--jobs 2]

Prints one line for each entry: registers and spill stores a thread, shared memory a program. Exits
with 1 when an entry spills at head dimension 64 or 128, spills more than 64 bytes at 256, or asks
for more shared memory than its card has.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hexiseq_triton.kernels import backward, forward
from hexiseq_triton.kernels.launch_tables import FORWARD, GRAD_KV, GRAD_Q, SAME_AS, Config

BINARIES = Path(triton.__file__).parent / "backends/nvidia/bin"
SHARED_KIB = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227}
MOST_SPILL_BYTES = {64: 0, 128: 0, 256: 64}
KERNELS: dict[str, tuple[Any, dict[tuple[str, int], Config], str, str]] = {
    # kernel, table, tensors in blocks of BLOCK_M, tensors in blocks of BLOCK_N
    "forward": (forward._forward_kernel, FORWARD, "q", "k v"),
    "grad_kv": (backward._grad_kv_kernel, GRAD_KV, "q do", "k v"),
    "grad_q": (backward._grad_q_kernel, GRAD_Q, "q do", "k v"),
}


@dataclass(frozen=True)
class Entry:
    """One kernel, compiled for one card."""

    kernel: str
    arch: str
    head_dim: int
    config: Config
    name: str = "causal"
    flags: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes."""

    registers: int
    spill_store_bytes: int
    shared_bytes: int


def entries(arch_filter: str | None = None, features: bool = False) -> Iterable[Entry]:
    """Yield the entries of all tables; with `features` those of the optional paths too."""
    for kernel, (_, table, _, _) in KERNELS.items():
        for (owner, head_dim), config in table.items():
            for arch in [owner, *(card for card, other in SAME_AS.items() if other == owner)]:
                if arch_filter in (None, arch):
                    for name, flags in _variants(kernel, features):
                        yield Entry(kernel, arch, head_dim, config, name, flags)


def _variants(kernel: str, features: bool) -> Iterable[tuple[str, dict[str, Any]]]:
    yield "causal", {}
    if kernel == "forward":
        yield "carried", {"FIRST": False, "LAST": False}
    if features:
        yield "window", {"HAS_LEFT": True}
        yield "softcap", {"SOFTCAP": True}


def compile_entry(entry: Entry) -> Resources:
    """Compile one entry with bf16 inputs and read its resources."""
    kernel, _, in_m, in_n = KERNELS[entry.kernel]
    config, d = entry.config, entry.head_dim
    constants = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "HEAD_DIM": d, "D": d,
        "HAS_LEFT": False, "HAS_RIGHT": True, "SOFTCAP": False, "FIRST": True, "LAST": True,
        "ACCUMULATE": True, "DESCRIPTORS": config.descriptors, "UPCAST": False,
        "PERSISTENT": False, **entry.flags,
    }  # fmt: skip
    blocks = dict.fromkeys(in_m.split(), config.block_m)
    blocks |= dict.fromkeys(in_n.split(), config.block_n)
    state = "*fp32"
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in blocks and config.descriptors:
            signature[name] = f"tensordesc<bf16[{blocks[name]}, {d}]>"
        elif name in (*blocks, "out"):
            signature[name] = "*bf16"
        elif name in ("o", "lse", "delta", "dq", "dk", "dv"):
            signature[name] = state
        elif name == "tile_map":
            signature[name] = "*i32"
        elif name in ("scale", "cap_scale", "cap", "softmax_scale"):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
        if signature[name].startswith("*") or name.startswith("stride"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    used = {(kernel.arg_names.index(n),): v for n, v in constants.items() if n in signature}
    source = ASTSource(kernel, signature, used, attributes)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    target = GPUTarget("cuda", int(entry.arch.removeprefix("sm_")), 32)
    compiled = triton.compile(source, target=target, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = _output("cuobjdump", "-res-usage", cubin.name)
        sass = _output("cuobjdump", "-sass", cubin.name)
    found = re.search(r"REG:(\d+)", usage)
    assert found, usage
    widths = {"": 4, ".64": 8, ".128": 16}
    spills = sum(widths[w] for w in re.findall(r"\bSTL(\.64|\.128|)\b", sass))
    return Resources(int(found[1]), spills, compiled.metadata.shared)


def _output(tool: str, *args: str) -> str:
    return subprocess.run(
        [str(BINARIES / tool), *args], capture_output=True, text=True, check=True
    ).stdout


def verdict(entry: Entry, resources: Resources) -> str:
    """Return what is wrong with an entry; "" where nothing is."""
    most = MOST_SPILL_BYTES[entry.head_dim] if entry.name in ("causal", "carried") else 64
    if resources.spill_store_bytes > most:
        return "spills"
    if resources.shared_bytes > SHARED_KIB[entry.arch] * 1024:
        return "shared memory"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="one architecture, as sm_90")
    parser.add_argument("--head-dim", type=int, help="one head dimension")
    parser.add_argument("--features", action="store_true", help="window and softcap too")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    wrong = 0
    todo = [
        entry
        for entry in entries(args.only, args.features)
        if args.head_dim in (None, entry.head_dim)
    ]
    print(f"{'kernel':9}{'card':7}{'D':>4} {'variant':9}{'tile':>9} w s  regs spill  KiB")
    with ProcessPoolExecutor(args.jobs) as processes:
        for entry, resources in zip(todo, processes.map(compile_entry, todo), strict=True):
            c, problem = entry.config, verdict(entry, resources)
            wrong += bool(problem)
            line = f"{entry.kernel:9}{entry.arch:7}{entry.head_dim:4} {entry.name:9}"
            line += f"{c.block_m:4}x{c.block_n:<4} {c.num_warps} {c.num_stages} "
            line += f"{resources.registers:5} {resources.spill_store_bytes:5} "
            print(f"{line}{resources.shared_bytes / 1024:4.0f}  {problem}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
