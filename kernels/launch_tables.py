"""Launch choices per architecture and head dimension. Nothing is tuned at run time.

A table maps (architecture, padded head dimension) to a `Config` for 2-byte inputs. Cards without
an entry get that of `sm_80` or, with less shared memory, of `sm_86`: both leave room to spare and
use nothing that newer cards lack. float32 is for tests and takes small blocks everywhere.

Measured: the sm_90 entries of head dimensions 64 and 128 (bench/results, run 3194cde9, H100) and
of 256 (docs/kernel-log.md, runs 2 and 3), dQ at 128 (run 4). All of sm_80 and sm_86, and all that
stand under `alone`, are blocks that compile without spills; they were never timed.
`bench/compile_all.py` compiles every entry and lists registers and spills.
"""

from __future__ import annotations

from functools import cache

import torch

from hexiseq_triton.kernels.configs import Config, Table
from hexiseq_triton.kernels.forms import Form
from hexiseq_triton.kernels.user_tables import tuned

FORWARD = Table(
    "forward",
    {
        ("sm_80", 64): Config(128, 64, 8, 3),
        ("sm_80", 128): Config(64, 64, 8, 3),
        ("sm_80", 256): Config(64, 32, 8, 2),
        ("sm_86", 64): Config(128, 64, 8, 2),
        ("sm_86", 128): Config(64, 64, 8, 2),
        ("sm_86", 256): Config(64, 32, 8, 1),
        ("sm_90", 64): Config(64, 64, 4, 2, descriptors=True),
        ("sm_90", 128): Config(64, 64, 4, 3, descriptors=True),
        ("sm_90", 256): Config(128, 64, 8, 2, descriptors=True),
    },
    alone={
        ("sm_90", 64): Config(128, 64, 8, 3, descriptors=True),
        ("sm_90", 128): Config(128, 64, 8, 3, descriptors=True),
        ("sm_90", 256): Config(128, 32, 8, 2, descriptors=True),
    },
)
"""Attention forward: BLOCK_M query rows a program, BLOCK_N keys a step."""

GRAD_KV = Table(
    "grad_kv",
    {
        ("sm_80", 64): Config(32, 64, 4, 2),
        ("sm_80", 128): Config(64, 64, 8, 2),
        ("sm_80", 256): Config(32, 64, 8, 1),
        ("sm_86", 64): Config(32, 64, 4, 2),
        ("sm_86", 128): Config(32, 64, 8, 2),
        ("sm_86", 256): Config(16, 32, 4, 1),
        ("sm_90", 64): Config(128, 64, 4, 2, descriptors=True),
        ("sm_90", 128): Config(64, 64, 4, 2, descriptors=True),
        ("sm_90", 256): Config(64, 64, 8, 2, descriptors=True),
    },
    alone={
        ("sm_80", 64): Config(32, 128, 8, 2),
        ("sm_80", 256): Config(32, 32, 8, 1),
        ("sm_86", 64): Config(32, 64, 8, 2),
        ("sm_86", 256): Config(32, 32, 8, 1),
        ("sm_90", 64): Config(64, 128, 8, 2, descriptors=True),
        ("sm_90", 128): Config(32, 128, 8, 2, descriptors=True),
        ("sm_90", 256): Config(64, 64, 8, 1, descriptors=True),
    },
)
"""dK and dV: BLOCK_N key rows a program, BLOCK_M queries a step."""

GRAD_Q = Table(
    "grad_q",
    {
        ("sm_80", 64): Config(128, 64, 8, 2),
        ("sm_80", 128): Config(128, 32, 8, 2),
        ("sm_80", 256): Config(64, 32, 8, 1),
        ("sm_86", 64): Config(128, 64, 8, 2),
        ("sm_86", 128): Config(64, 32, 4, 2),
        ("sm_86", 256): Config(32, 32, 4, 1),
        ("sm_90", 64): Config(64, 64, 4, 3, descriptors=True),
        ("sm_90", 128): Config(64, 64, 4, 3, descriptors=True),
        ("sm_90", 256): Config(64, 32, 4, 3, descriptors=True),
    },
    alone={
        ("sm_80", 128): Config(64, 32, 8, 2),
        ("sm_80", 256): Config(32, 32, 8, 2),
        ("sm_86", 128): Config(64, 32, 8, 2),
        ("sm_86", 256): Config(32, 32, 8, 2),
        ("sm_90", 64): Config(128, 64, 8, 3, descriptors=True),
        ("sm_90", 128): Config(128, 64, 8, 3, descriptors=True),
        ("sm_90", 256): Config(64, 32, 8, 3, descriptors=True),
    },
)
"""dQ: BLOCK_M query rows a program, BLOCK_N keys a step."""

FLOAT32 = Config(16, 16, 4, 1)
"""All kernels with float32 inputs, whose blocks widen to float64 on the way to a product."""

SAME_AS = {"sm_89": "sm_86"}
"""Cards that share entries: 99 KB of shared memory, the same tensor instructions."""

INTERPRETED = Config(64, 64, 4, 1)
LEAST_SHARED_BYTES = {"sm_80": 160 * 1024, "sm_86": 99 * 1024}
"""Whose entries an unknown card gets: the first whose shared memory it has, in this order."""


def config_for(table: Table, q: torch.Tensor | Form, sm_margin: int = 0) -> Config:
    """Return the launch choice for queries like `q` on their device.

    The user's own measurements come first, see user_tables.py; but they are of whole cards. If
    `sm_margin` multiprocessors are to stay free, the others hold one program each.
    """
    device, head_dim = q.device, q.shape[-1]
    padded = 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256
    if device.type != "cuda":
        return INTERPRETED
    if q.dtype == torch.float32:
        return FLOAT32
    key = architecture(device), padded
    if sm_margin and key in table.alone:
        return table.alone[key]
    return tuned(device).get((table.name, padded)) or table[key]


@cache
def architecture(device: torch.device) -> str:
    """Return the architecture whose entries fit the card.

    Raises:
        ValueError: if the card has too little shared memory for any.
    """
    properties = torch.cuda.get_device_properties(device)
    name = f"sm_{properties.major}{properties.minor}"
    name = SAME_AS.get(name, name)
    if name in {arch for arch, _ in FORWARD}:
        return name
    shared = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    for arch, least in LEAST_SHARED_BYTES.items():
        if shared >= least:
            return arch
    raise ValueError(
        f"{properties.name} has {shared} bytes of shared memory a program; "
        f"the kernels need {min(LEAST_SHARED_BYTES.values())}"
    )
