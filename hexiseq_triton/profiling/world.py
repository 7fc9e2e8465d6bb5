"""The processes that torchrun started, met without a plan: to measure, check or compare."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from hexiseq_triton.environment import start_world
from hexiseq_triton.errors import ConfigError


def check_started_by_torchrun(command: str) -> None:
    """Raise a ConfigError that shows the command to type, unless torchrun started this process."""
    if "RANK" not in os.environ and not dist.is_initialized():
        raise ConfigError(
            f"hexiseq {command} runs under torchrun, one process a GPU; on one host of four GPUs:\n"
            f"  torchrun --nproc-per-node 4 --no-python hexiseq {command} ..."
        )


def profile_command(world_size: int) -> str:
    """Return the command that measures a cluster of one host; of several, add its options."""
    return f"torchrun --nproc-per-node {world_size} --no-python hexiseq profile --out cluster.yaml"


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
