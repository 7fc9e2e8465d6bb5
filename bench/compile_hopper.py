"""Cross-compile the Gluon kernels for Hopper, without a GPU, and read the machine code.

    python bench/compile_hopper.py [--only NAME]

Prints one line for each variant: registers, spill stores a thread, spilling instructions in hot
loops, shared memory a program. Exits with 1 when a variant

    spills in a hot loop, but for a few of its 550 instructions where MAY_SPILL says so,
    spills more than `guard.MOST_SPILLS` registers anywhere,
    has its tensor-core instructions serialised by ptxas (C75.. warnings, which Triton hides),
    asks for more shared memory than the card has.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import triton
from compiled import BINARIES, Resources, resources_of
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from hexiseq_triton.kernels.hopper import backward, forward, grad_kv, grad_q, guard
from hexiseq_triton.kernels.hopper.api import gl

SHARED_KIB = 227
MOST_IN_HOT_LOOPS = 6
"""Spilling instructions: three values that stand in memory for part of a step."""
MAY_SPILL = ("fp16", "softcap", "accumulate", "backward 128 window", "forward 256")
"""Parts of the names of variants that do so and are fast."""
ELEMENTS = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32}
FLOATS = ("scale", "cap_scale", "cap", "softmax_scale")
FORWARD: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp16": {"dtype": "fp16"},
    "exact": {"EXACT": True},
    "window": {"HAS_LEFT": True},
    "softcap": {"SOFTCAP": True},
    "sink": {"HAS_SINK": True},
    "first of several": {"last": False},
    "between": {"FIRST": False, "last": False},
    "last of several": {"FIRST": False},
}
BACKWARD: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp16": {"dtype": "fp16"},
    "fp16 window": {"dtype": "fp16", "HAS_LEFT": True},
    "window": {"HAS_LEFT": True},
    "softcap": {"SOFTCAP": True},
    "repeatable": {"FUSED": False},
    "accumulate": {"ACCUMULATE": True},
}


def compiled_forward(
    head_dim: int, dtype: str = "bf16", *, last: bool = True, **flags: bool
) -> tuple[Any, dict[str, Any]]:
    """Return the types and constants of a variant of the forward; `last` writes the output."""
    tile = forward.TILES[head_dim]
    constants = {
        "BLOCK_N": tile.block_n, "D": head_dim, "STAGES": tile.stages, "HAS_LEFT": False,
        "SOFTCAP": False, "FIRST": True, "HAS_SINK": False, "EXACT": False,
        "num_warps": 4, **flags,
    }  # fmt: skip
    small, first = head_dim <= forward.IN_REGISTERS.value, constants["FIRST"]
    constants["STAGED"] = small or (first and last)
    written = dtype if last else "fp32"
    types = {
        "q": _blocks(dtype, forward.ROWS.value, head_dim),
        "k": _blocks(dtype, tile.block_n, head_dim),
        "v": _blocks(dtype, 1, 1, tile.block_n, head_dim),
        "out": f"*{written}",
        **dict.fromkeys(("taken", "tile_map"), "*i32"),
        **dict.fromkeys(("o", "out_tiles", "lse", "sink"), "*fp32"),
    }
    if small and not first:
        types["o"] = _blocks("fp32", 1, 1, forward.ROWS.value, head_dim)
    if constants["STAGED"]:
        types["out_tiles"] = _blocks(written, 1, 1, forward.ROWS.value, head_dim)
    return types, constants


def compiled_backward(
    head_dim: int, dtype: str = "bf16", **flags: bool
) -> tuple[Any, dict[str, Any]]:
    """Return the types and constants of a variant of the backward."""
    config = backward.CONFIGS[head_dim]
    queries, columns = backward.queries_of(head_dim), backward.COLUMNS.value
    constants = {
        "BLOCK_M": config.block_m, "D": head_dim, "STAGES": config.num_stages, "HAS_LEFT": False,
        "SOFTCAP": False, "FUSED": True, "ACCUMULATE": False, "num_warps": 4,
        **flags,
    }  # fmt: skip
    rows = _blocks(dtype, 1, 1, config.block_m, head_dim)
    keys = _blocks(dtype, 1, 1, config.block_n, head_dim)
    types = {"q": rows, "k": keys, "v": keys, "do": rows, "lse": "*fp32", "delta": "*fp32"}
    added = _blocks("fp32", 1, 1, queries, columns)
    types["dq"] = added if constants["FUSED"] else f"*{dtype}"
    types["dk"] = types["dv"] = "*fp32" if constants["ACCUMULATE"] else f"*{dtype}"
    return types | dict.fromkeys(("items", "counter", "tile_map"), "*i32"), constants


def compiled_grad_kv(dtype: str = "bf16", **flags: bool) -> tuple[Any, dict[str, Any]]:
    """Return the types and constants of a variant of dK and dV at head dimension 256."""
    config, head_dim = grad_kv.CONFIG, grad_kv.HEAD_DIM
    constants = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "D": head_dim,
        "STAGES": config.num_stages, "HAS_LEFT": False, "SOFTCAP": False,
        "ACCUMULATE": False, "num_warps": 4, **flags,
    }  # fmt: skip
    rows = _blocks(dtype, 1, 1, config.block_m, head_dim)
    keys = _blocks(dtype, 1, 1, config.block_n, head_dim)
    types = {"q": rows, "k": keys, "v": keys, "do": rows, "lse": "*fp32", "delta": "*fp32"}
    types["dk"] = types["dv"] = "*fp32" if constants["ACCUMULATE"] else f"*{dtype}"
    return types | dict.fromkeys(("items", "counter", "tile_map"), "*i32"), constants


def compiled_grad_q(dtype: str = "bf16", **flags: bool) -> tuple[Any, dict[str, Any]]:
    """Return the types and constants of a variant of dQ at head dimension 256."""
    config, head_dim = grad_q.CONFIG, grad_q.HEAD_DIM
    constants = {
        "BLOCK_N": config.block_n, "D": head_dim, "STAGES": config.num_stages, "HAS_LEFT": False,
        "SOFTCAP": False, "ACCUMULATE": False, "num_warps": 4, **flags,
    }  # fmt: skip
    rows = _blocks(dtype, 1, 1, config.block_m, head_dim)
    types = dict.fromkeys(("q", "k", "v", "do"), rows) | {"lse": "*fp32", "delta": "*fp32"}
    types["dq"] = "*fp32" if constants["ACCUMULATE"] else f"*{dtype}"
    return types | {"tile_map": "*i32"}, constants


def _blocks(dtype: str, *shape: int) -> str:
    layout = gl.NVMMASharedLayout.get_default_for(list(shape), ELEMENTS[dtype])
    return f"tensordesc<{dtype}{list(shape)},{layout!r}>"


def compile_hopper(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any]
) -> tuple[Resources, list[str]]:
    """Compile one variant; return its resources and what ptxas says of serialised products."""
    names = kernel.arg_names
    signature = {
        name: "constexpr"
        if name in constants
        else types.get(name, "fp32" if name in FLOATS else "i32")
        for name in names
    }
    aligned = [n for n in names if signature[n].startswith("*") or n.startswith("stride")]
    source = GluonASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    return resources_of(compiled), _serialised(compiled.asm["ptx"])


def _serialised(ptx: str) -> list[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(ptx)
        source.flush()
        command = [BINARIES / "ptxas", "-v", "-arch=sm_90a", source.name, "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return re.findall(r"\(C75\d\d\).*", done.stdout + done.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="variants whose name contains this, as 'forward 128 plain'")
    args = parser.parse_args()
    todo = [
        (f"{direction} {head_dim} {name}", kernel, arguments(head_dim, **flags))
        for direction, kernel, arguments, variants in (
            ("forward", forward._forward_kernel, compiled_forward, FORWARD),
            ("backward", backward._backward_kernel, compiled_backward, BACKWARD),
        )
        for head_dim in guard.HEAD_DIMS[direction]
        for name, flags in variants.items()
        if name != "repeatable" or head_dim in guard.HEAD_DIMS["grad_kv"]
    ]
    todo += [
        (f"{part} 256 {name}", kernel, arguments(**flags))
        for part, kernel, arguments in (
            ("grad_kv", grad_kv._grad_kv_kernel, compiled_grad_kv),
            ("grad_q", grad_q._grad_q_kernel, compiled_grad_q),
        )
        for name, flags in BACKWARD.items()
        if name != "repeatable"
    ]
    wrong = 0
    print(f"{'variant':32} regs spill hot  KiB")
    for name, kernel, (types, constants) in todo:
        if args.only and args.only not in name:
            continue
        r, warnings = compile_hopper(kernel, types, constants)
        most = MOST_IN_HOT_LOOPS if any(part in name for part in MAY_SPILL) else 0
        bad = list(warnings)
        bad += ["spills in a hot loop"] * (r.spills_in_hot_loops > most)
        bad += ["spills"] * (r.spill_store_bytes > 4 * guard.MOST_SPILLS)
        bad += ["shared memory"] * (r.shared_bytes > SHARED_KIB * 1024)
        wrong += bool(bad)
        line = f"{name:32} {r.registers:4} {r.spill_store_bytes:5} {r.spills_in_hot_loops:3}"
        print(f"{line} {r.shared_bytes / 1024:4.0f}  {'; '.join(bad)}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
