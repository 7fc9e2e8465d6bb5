"""Cross-compile every kernel for every card of the launch tables, without a GPU.

    python bench/compile_all.py [--only sm_90] [--kernel forward] [--head-dim 128] [--covering]

Prints one line for each: registers and spill stores a thread, spilling instructions in hot loops,
shared memory a program. Exits with 1 when a kernel

    spills at head dimension 64 or 128 without optional features,
    spills more than 64 bytes at 256 or with an optional feature, or anything in a hot loop, or
    asks for more shared memory than its card has.

Features are a window, a softcap, a sink, and a persistent grid, which `sm_margin` asks for.
`--covering` takes few: each kernel on each card, at each head dimension, in each form.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from compiled import Resources, compile_for

from hexiseq_triton.kernels import add_partials, delta, forward, grad_kv, grad_q, pack
from hexiseq_triton.kernels.configs import Config, Table
from hexiseq_triton.kernels.launch_tables import FORWARD, GRAD_KV, GRAD_Q, SAME_AS

SHARED_KIB = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227}
MOST_SPILL_BYTES = 64  # at head dimension 256 and with optional features

KERNELS: dict[str, Any] = {
    "forward": forward._forward_kernel,
    "grad_kv": grad_kv._grad_kv_kernel,
    "grad_q": grad_q._grad_q_kernel,
    "delta": delta._delta_kernel,
    "pack": pack._move_kernel,
    "unpack": pack._move_kernel,
    "add": add_partials._add_kernel,
}
TABLES: dict[str, Table] = {"forward": FORWARD, "grad_kv": GRAD_KV, "grad_q": GRAD_Q}
PLAIN: dict[str, Any] = {
    "HAS_LEFT": False, "HAS_RIGHT": True, "SOFTCAP": False, "FIRST": True, "LAST": True,
    "HAS_SINK": False, "ACCUMULATE": True, "UPCAST": False, "PERSISTENT": False,
}  # fmt: skip
FEATURES: dict[str, dict[str, bool]] = {
    "window": {"HAS_LEFT": True},
    "softcap": {"SOFTCAP": True},
}
PERSISTENT = {"persist": {"PERSISTENT": True}}
FORWARD_FEATURES: dict[str, dict[str, bool]] = {
    "sink": {"HAS_SINK": True},
}
TYPES = {
    **dict.fromkeys(
        ("lse", "delta", "o", "sink", "dq", "dk", "dv", "cos", "sin", "total"), "*fp32"
    ),
    **dict.fromkeys(("out", "do", "x0", "x1", "x2", "away", "own", "pool"), "*bf16"),
    **dict.fromkeys(("chunks", "places", "tiles", "sources"), "*i64"),
    **dict.fromkeys(("scale", "cap_scale", "cap", "softmax_scale"), "fp32"),
    "tile_map": "*i32",
}


@dataclass(frozen=True)
class Entry:
    """One kernel to compile for one card."""

    name: str
    arch: str
    head_dim: int
    variant: str
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int

    @property
    def tile(self) -> str:
        c = self.constants
        return f"{c['BLOCK_M']}x{c['BLOCK_N']}" if "BLOCK_M" in c else ""


def entries() -> Iterable[Entry]:
    """Yield everything that a card may run."""
    for name, table in TABLES.items():
        for (owner, head_dim), config in table.items():
            for arch in [owner, *(card for card, other in SAME_AS.items() if other == owner)]:
                for variant, flags in variants(name).items():
                    chosen = config
                    if variant in PERSISTENT:
                        chosen = table.alone.get((owner, head_dim), config)
                    yield attention_entry(name, arch, head_dim, chosen, variant, flags)
    for arch in SHARED_KIB:
        for head_dim in (64, 128, 256):
            yield from moving_entries(arch, head_dim)
        block = {"BLOCK": add_partials.BLOCK}
        yield Entry("add", arch, 128, "plain", TYPES, block, add_partials.NUM_WARPS, 3)


def variants(name: str) -> dict[str, dict[str, bool]]:
    """Return the flags of each form in which an attention kernel is compiled."""
    if name != "forward":
        return {"plain": {}, **FEATURES, **PERSISTENT}
    carried = {"carried": {"FIRST": False, "LAST": False}, "last": {"FIRST": False}}
    return {"plain": {}, **carried, **FEATURES, **FORWARD_FEATURES, **PERSISTENT}


def attention_entry(
    name: str, arch: str, head_dim: int, config: Config, variant: str, flags: dict[str, bool]
) -> Entry:
    """Return one launch choice of an attention kernel, with bf16 inputs."""
    m, n = config.block_m, config.block_n
    rows = {"q": m, "do": m, "k": n, "v": n}
    inputs = dict.fromkeys((*rows, "edge_v"), "*bf16")
    if config.descriptors:
        plain = {x: f"tensordesc<bf16[{size}, {head_dim}]>" for x, size in rows.items()}
        bounded = {x: f"tensordesc<bf16[1, 1, {size}, {head_dim}]>" for x, size in rows.items()}
        inputs = plain | {"edge_v": bounded["v"]} if name == "forward" else bounded
    constants = PLAIN | flags
    constants |= {"BLOCK_M": m, "BLOCK_N": n, "HEAD_DIM": head_dim, "D": head_dim}
    constants |= {"DESCRIPTORS": config.descriptors}
    return Entry(
        name, arch, head_dim, variant, TYPES | inputs, constants,
        config.num_warps, config.num_stages,
    )  # fmt: skip


def moving_entries(arch: str, head_dim: int) -> Iterable[Entry]:
    """Yield delta, pack and unpack."""
    rows = {"ROWS": delta.ROWS, "HEAD_DIM": head_dim, "D": head_dim}
    yield Entry("delta", arch, head_dim, "plain", TYPES, rows, 4, 3)
    rows = {"ROWS": pack.BLOCK_BYTES // (2 * head_dim), "D": head_dim, "PAD": head_dim}
    half = head_dim // 4  # half of the head turns
    for name in ("pack", "unpack"):
        for variant, turned in (("plain", 0), ("halves", half), ("pairs", half)):
            constants = rows | {
                "UNPACK": name == "unpack", "INTERLEAVED": variant == "pairs",
                "HALF": turned, "HALF_PAD": max(1, turned), "REST_PAD": head_dim - 2 * turned,
            }  # fmt: skip
            yield Entry(name, arch, head_dim, variant, TYPES, constants, pack.NUM_WARPS, 3)


def covering(todo: list[Entry]) -> list[Entry]:
    """Return few entries with each (kernel, card), (kernel, head dimension), (kernel, variant)."""

    def pairs(entry: Entry) -> set[tuple[str, str | int]]:
        return {(entry.name, x) for x in (entry.arch, entry.head_dim, entry.variant)}

    chosen: list[Entry] = []
    left = set().union(*map(pairs, todo))
    while left:
        chosen.append(max(todo, key=lambda entry: len(pairs(entry) & left)))
        left -= pairs(chosen[-1])
    return chosen


def resources_of(entry: Entry) -> Resources:
    """Compile one entry."""
    return compile_for(
        entry.arch,
        KERNELS[entry.name],
        entry.types,
        entry.constants,
        entry.num_warps,
        entry.num_stages,
    )


def verdict(entry: Entry, resources: Resources) -> str:
    """Return what is wrong with an entry; "" where nothing is."""
    if resources.shared_bytes > SHARED_KIB[entry.arch] * 1024:
        return "shared memory"
    plain = entry.head_dim < 256 and entry.variant not in FEATURES | FORWARD_FEATURES | PERSISTENT
    if resources.spills_in_hot_loops:
        return "spills in a loop"
    if resources.spill_store_bytes > (0 if plain else MOST_SPILL_BYTES):
        return "spills"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="one architecture, as sm_90")
    parser.add_argument("--kernel", help="one kernel, as forward")
    parser.add_argument("--head-dim", type=int, help="one head dimension")
    parser.add_argument("--covering", action="store_true", help="a few that cover all")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    todo = [
        entry
        for entry in entries()
        if args.only in (None, entry.arch)
        and args.kernel in (None, entry.name)
        and args.head_dim in (None, entry.head_dim)
    ]
    todo = covering(todo) if args.covering else todo
    print(f"{'kernel':9}{'card':7}{'D':>4} {'variant':9}{'tile':>8} w s  regs spill loop  KiB")
    wrong = 0
    with ProcessPoolExecutor(args.jobs) as processes:
        for entry, found in zip(todo, processes.map(resources_of, todo), strict=True):
            problem = verdict(entry, found)
            wrong += bool(problem)
            line = f"{entry.name:9}{entry.arch:7}{entry.head_dim:4} {entry.variant:9}"
            line += f"{entry.tile:>8} {entry.num_warps} {entry.num_stages} "
            line += f"{found.registers:5} {found.spill_store_bytes:5} {found.spills_in_hot_loops:4}"
            print(f"{line} {found.shared_bytes / 1024:4.0f}  {problem}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
