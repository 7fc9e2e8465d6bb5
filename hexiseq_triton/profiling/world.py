"""The processes that torchrun started, met without a plan: to measure, check or compare."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hexiseq_triton.emulation.emulate import Emulation
from hexiseq_triton.environment import start_world


def profile_command(
    world_size: int, model: str, out: str | Path, emulation: Emulation | None = None
) -> str:
    """Return the command that measures a cluster of one host; of several, add its options.

    Args:
        world_size: processes to start.
        model: what will be trained; rates depend on its width.
        out: the cluster file.
        emulation: slow ranks, emulated again.
    """
    command = f"torchrun --nproc-per-node {world_size} --no-python hexiseq profile".split()
    command += ["--model", model, "--out", str(out)]
    return shlex.join([*command, *(() if emulation is None else emulation.arguments)])


@contextmanager
def world(device: torch.device, timeout: timedelta) -> Iterator[None]:
    """Let all processes meet; a world that stands already is used and left as it is."""
    if dist.is_initialized():
        yield
        return
    start_world(device, timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()
