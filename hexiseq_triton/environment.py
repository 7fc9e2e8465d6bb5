"""What PyTorch is told before it uses a GPU or NCCL, where the environment says nothing yet.

PYTORCH_ALLOC_CONF=expandable_segments:True lets the allocator's segments grow. Adam's moments come
into being after the first backward, amid its activations' memory; segments of fixed sizes are then
cut so that the next activations find no room: up to 20 % of them is lost.

TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC: once the timeout is over, a rank whose peer is gone waits four
times as long for PyTorch's record of what hung to be written before it ends. Unless it is set, that
is a minute.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

DUMP_MILLISECONDS = 500
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The name, and that of earlier versions of PyTorch, which works too."""


def settle_environment() -> None:
    """Set what the environment leaves open; to be called before the GPU is used."""
    if not any(name in os.environ for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", str(DUMP_MILLISECONDS))


def start_world(device: torch.device, timeout: timedelta) -> None:
    """Let the processes that torchrun started meet: over NCCL with a GPU, else over gloo."""
    settle_environment()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=timeout)
