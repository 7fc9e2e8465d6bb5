"""Launch choices per architecture and head dimension. Nothing is tuned at run time.

A table maps (architecture, padded head dimension) to a `Config` for 2-byte inputs. Cards without
an entry get that of `sm_80` or, with less shared memory, of `sm_86`: both leave room to spare and
use nothing that newer cards lack. float32 is for tests and takes small blocks everywhere.

Measured: the sm_90 entries of head dimensions 64 and 128 (bench/results, run 3194cde9, H100) and
of 256 (docs/kernel-log.md, runs 2 and 3). Those of sm_80 and sm_86 are blocks that compile without
spills; they were never timed.
`bench/compile_all.py` compiles every entry and lists registers and spills.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Config:
    """Rows of queries and keys in a block, warps and pipeline stages of a program.

    With `programs_per_sm` the grid is persistent: so many programs stay on each multiprocessor and
    walk the work items. 0 launches one program for each item, unless some multiprocessors are to
    stay free. `descriptors` loads blocks with the copy engine where strides allow it.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    descriptors: bool = False
    programs_per_sm: int = 0

    def num_programs(self, num_items: int, device: torch.device, sm_margin: int) -> int:
        """Return the size of the grid."""
        if device.type != "cuda":
            return min(num_items, 3)  # the interpreter: a few programs, several items each
        if not self.programs_per_sm and not sm_margin:
            return num_items
        free = max(1, num_sms(device) - sm_margin)
        return min(num_items, free * max(1, self.programs_per_sm))


Table = dict[tuple[str, int], Config]

FORWARD: Table = {
    ("sm_80", 64): Config(128, 64, 8, 3),
    ("sm_80", 128): Config(64, 64, 8, 3),
    ("sm_80", 256): Config(64, 32, 8, 2),
    ("sm_86", 64): Config(128, 64, 8, 2),
    ("sm_86", 128): Config(64, 64, 8, 2),
    ("sm_86", 256): Config(64, 32, 8, 1),
    ("sm_90", 64): Config(64, 64, 4, 2, descriptors=True),
    ("sm_90", 128): Config(64, 64, 4, 3, descriptors=True),
    ("sm_90", 256): Config(128, 64, 8, 2, descriptors=True),
}
"""Attention forward: BLOCK_M query rows a program, BLOCK_N keys a step."""

GRAD_KV: Table = {
    ("sm_80", 64): Config(32, 64, 4, 2),
    ("sm_80", 128): Config(64, 64, 8, 2),
    ("sm_80", 256): Config(32, 64, 8, 1),
    ("sm_86", 64): Config(32, 64, 4, 2),
    ("sm_86", 128): Config(32, 64, 8, 2),
    ("sm_86", 256): Config(16, 32, 4, 1),
    ("sm_90", 64): Config(128, 64, 4, 2, descriptors=True),
    ("sm_90", 128): Config(64, 64, 4, 2, descriptors=True),
    ("sm_90", 256): Config(64, 64, 8, 2, descriptors=True),
}
"""dK and dV: BLOCK_N key rows a program, BLOCK_M queries a step."""

GRAD_Q: Table = {
    ("sm_80", 64): Config(128, 64, 8, 2),
    ("sm_80", 128): Config(128, 32, 8, 2),
    ("sm_80", 256): Config(64, 32, 8, 1),
    ("sm_86", 64): Config(128, 64, 8, 2),
    ("sm_86", 128): Config(64, 32, 4, 2),
    ("sm_86", 256): Config(32, 32, 4, 1),
    ("sm_90", 64): Config(64, 64, 4, 3, descriptors=True),
    ("sm_90", 128): Config(64, 64, 4, 2, descriptors=True),
    ("sm_90", 256): Config(64, 32, 4, 3, descriptors=True),
}
"""dQ: BLOCK_M query rows a program, BLOCK_N keys a step."""

FLOAT32: dict[int, Config] = {
    64: Config(32, 32, 4, 1),
    128: Config(32, 32, 4, 1),
    256: Config(16, 16, 4, 1),
}
"""All kernels with float32 inputs, by padded head dimension."""

SAME_AS = {"sm_89": "sm_86"}
"""Cards that share entries: 99 KB of shared memory, the same tensor instructions."""

INTERPRETED = Config(64, 64, 4, 1)
SHARED_BYTES_OF_SM_80 = 160 * 1024


def config_for(table: Table, q: torch.Tensor) -> Config:
    """Return the launch choice for queries like `q` on their device."""
    head_dim = 64 if q.shape[-1] <= 64 else 128 if q.shape[-1] <= 128 else 256
    if q.device.type != "cuda":
        return INTERPRETED
    if q.dtype == torch.float32:
        return FLOAT32[head_dim]
    return table[architecture(q.device), head_dim]


@cache
def architecture(device: torch.device) -> str:
    """Return the architecture whose entries fit the card."""
    major, minor = torch.cuda.get_device_capability(device)
    name = f"sm_{major}{minor}"
    name = SAME_AS.get(name, name)
    if name in {arch for arch, _ in FORWARD}:
        return name
    properties = torch.cuda.get_device_properties(device)
    shared = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return "sm_80" if shared >= SHARED_BYTES_OF_SM_80 else "sm_86"


@cache
def num_sms(device: torch.device) -> int:
    """Return how many multiprocessors the card has."""
    return torch.cuda.get_device_properties(device).multi_processor_count
