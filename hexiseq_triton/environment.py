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
from itertools import count

import torch
import torch.distributed as dist

from hexiseq_triton.errors import ConfigError, PeerError

DUMP_MILLISECONDS = 500
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The name, and that of earlier versions of PyTorch, which works too."""

_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun tells each process: which it is, and where it meets the others."""

_stores: dict[tuple[str, ...], dist.Store] = {}
"""The store of each place where processes have met. Their next world meets there too: rank 0 may
serve it, and would not be done with closing it when the others come again."""
_worlds = count()


def settle_environment() -> None:
    """Set what the environment leaves open; to be called before the GPU is used."""
    if not any(name in os.environ for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", str(DUMP_MILLISECONDS))


def start_world(device: torch.device, timeout: timedelta, name: str | None = None) -> None:
    """Let the processes that torchrun started meet: over NCCL with a GPU, else over gloo.

    Args:
        device: this process's device.
        timeout: how long a rank waits for another.
        name: of this world among all of these processes, the same on every rank; left out, they
            have started as many before.

    Raises:
        ConfigError: if torchrun did not start this process.
        PeerError: if the processes do not all meet.
    """
    name = f"world {next(_worlds)}" if name is None else name
    check_started_by_torchrun("script.py")
    settle_environment()
    try:
        # of its own: addresses of an earlier world would be taken for those of this one
        store = dist.PrefixStore(f"hexiseq/{name}", _store(timeout))
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        own, number, address, port = _place()
        why = str(error).splitlines()[0].rstrip(".")
        raise PeerError(
            f"rank {own}: the {number} processes did not meet at {address}:{port} (timeout "
            f"{timeout.total_seconds():g} s): {why}. Start all of them, with an address that every "
            "host reaches and a free port"
        ) from error


def _place() -> tuple[str, ...]:
    return tuple(os.environ[name] for name in _RENDEZVOUS)


def _store(timeout: timedelta) -> dist.Store:
    """Return the store at which torchrun lets the processes meet."""
    place = _place()
    if place not in _stores:
        _stores[place], _, _ = next(dist.rendezvous("env://", timeout=timeout))
    _stores[place].set_timeout(timeout)
    return _stores[place]


def check_started_by_torchrun(program: str, how: str = "") -> None:
    """Raise a ConfigError that says how to start, unless torchrun started this process.

    Args:
        program: what torchrun should start, as it is typed after its options.
        how: told in place of a torchrun line.
    """
    missing = [name for name in _RENDEZVOUS if name not in os.environ]
    if missing and not dist.is_initialized():
        how = how or f"on one host of four GPUs:\n  torchrun --nproc-per-node 4 {program}"
        raise ConfigError(
            f"the environment lacks {', '.join(missing)}, which torchrun sets: this runs under "
            f"torchrun, one process a GPU; {how}"
        )
