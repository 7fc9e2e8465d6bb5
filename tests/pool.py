"""A pool of processes in one world, kept for a whole test session.

`Pool.run(worker, *args)` calls a module-level function once per rank, as `worker(rank, *args)`, and
returns the results in rank order. A failing rank fails the caller with that rank's traceback.

Processes on the CPU are forked from a server that has imported what they need, which takes longer
than most tests. Processes on GPUs start afresh: CUDA does not survive a fork.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = timedelta(seconds=30)
IMPORTED = [
    "hexiseq_triton",
    "torch.testing",
    "hexiseq_triton.integrations.hf_trainer",
    "trl.trainer.sft_trainer",
]
"""By the server, as far as they are installed."""


class Outcome:
    """What one rank's call came to: a value, or an error as text with its type's name."""

    def __init__(self, value: Any = None, error: str = "", kind: str = "", trace: str = "") -> None:
        self.value, self.error, self.kind, self.trace = value, error, kind, trace


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(
    rank: int,
    world_size: int,
    port: int,
    backend: str,
    path: list[str],
    environment: dict[str, str],
    inbox: Connection,
) -> None:
    sys.path[:] = path
    os.environ |= environment
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # deterministic mode asks for it
    device = torch.device("cuda", rank) if backend == "nccl" else None
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
        device_id=device,
    )
    while True:
        try:
            job = inbox.recv()
        except EOFError:
            break
        if job is None:
            break
        worker, args = job
        try:
            outcome = Outcome(worker(rank, *args))
        except BaseException as error:
            outcome = Outcome(None, str(error), type(error).__name__, traceback.format_exc())
        inbox.send(outcome)
    os._exit(0)  # groups broken on purpose must not be waited for


class Pool:
    """`world_size` processes that have met; use as a context manager.

    With backend "nccl" process r uses GPU r. `afresh` starts processes that may use GPUs with gloo.
    """

    def __init__(self, world_size: int, backend: str = "gloo", *, afresh: bool = False) -> None:
        forked = backend == "gloo" and not afresh
        context = mp.get_context("forkserver" if forked else "spawn")
        if forked:
            context.set_forkserver_preload(IMPORTED)
            # else the server would import from the folder it is started in
            with patch.dict(os.environ, PYTHONSAFEPATH="1"):
                forkserver.ensure_running()
        port = free_port()
        self._outboxes: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, world_size, port, backend, sys.path, dict(os.environ), theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._outboxes.append(ours)
            self.processes.append(process)

    def outcomes(self, worker: Callable[..., Any], *args: Any) -> list[Outcome]:
        """Run `worker` on every rank; return what each came to, errors included."""
        for outbox in self._outboxes:
            outbox.send((worker, args))
        found = []
        for rank, outbox in enumerate(self._outboxes):
            try:
                found.append(outbox.recv())
            except EOFError:
                found.append(Outcome(None, f"rank {rank} died", "Died"))
        return found

    def run(self, worker: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `worker` on every rank; return the values, or fail with the first error."""
        found = self.outcomes(worker, *args)
        for rank, outcome in enumerate(found):
            if outcome.kind:
                raise AssertionError(f"rank {rank}: {outcome.trace or outcome.error}")
        return [outcome.value for outcome in found]

    def close(self) -> None:
        for outbox in self._outboxes:
            outbox.close()
        for process in self.processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
