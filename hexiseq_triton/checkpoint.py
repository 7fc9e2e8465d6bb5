"""Save and resume training with torch.distributed.checkpoint (DCP), one folder a checkpoint.

DCP writes shards and reads them back under any number of ranks, so a run may go on under another
plan. Its `.metadata` file is written last: a folder without one is no checkpoint.

For other programs the weights alone can be gathered and written whole:

    export_safetensors(path, model, context.world_group)                   # one file
    weights = whole_weights(model, context.world_group)                    # a transformers model
    if context.rank == 0: model.save_pretrained(folder, state_dict=weights)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from hexiseq_triton.errors import ConfigError


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup,
) -> None:
    """Write the state after `step` steps; a collective call of all ranks.

    Raises:
        ConfigError: the same on every rank, if one of them cannot write.
    """
    state = _state(model, optimizer) | {"step": step}
    target = folder / f"step-{step:08d}"
    if dist.get_rank(group) == 0:
        # an earlier run's: while it is overwritten the folder is no checkpoint. DCP plans on this
        # rank before any rank writes, and says itself what is wrong with the folder
        with suppress(OSError):
            (target / ".metadata").unlink()
    with _briefly(f"{target} cannot be written"):
        dcp.save(state, checkpoint_id=target, process_group=group)


def resume(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup
) -> int:
    """Load the newest checkpoint that the first rank finds; return its step.

    Raises:
        ConfigError: the same on every rank, if there is no checkpoint, it cannot be read, or it is
            another model's.
    """
    state = _state(model, optimizer) | {"step": 0}
    found: list[Any] = [None, ""]
    if dist.get_rank(group) == 0:
        found = list(_found(folder, state["model"]))
    checkpoint, problem = _from_first(found, model, group)
    if problem:
        raise ConfigError(f"resume: {problem}")
    with _briefly(f"resume: {checkpoint} cannot be read"):
        dcp.load(state, checkpoint_id=checkpoint, process_group=group)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return int(state["step"])


def whole_weights(model: nn.Module, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """Return all weights and buffers, whole and on the CPU, to the first rank; others get none.

    A collective call of all ranks of `group`. A rank holds one whole tensor at a time beside its
    shards, the first rank all of them.
    """
    first = dist.get_rank(group) == 0
    whole = {}
    # under the model's own names: DDP and torch.compile put theirs before them
    for name, held in get_model_state_dict(model).items():
        if not isinstance(held, torch.Tensor):
            continue  # what a module says beside its weights
        if isinstance(held, DTensor):  # which FSDP2 may have put on the CPU
            moved = held.to(held.device_mesh.device_type)
            held = cast(DTensor, moved).full_tensor()
        if first:
            whole[name] = held.detach().cpu().clone()
    return whole


def export_safetensors(path: Path, model: nn.Module, group: dist.ProcessGroup) -> None:
    """Write all weights as one safetensors file; a collective call of all ranks of `group`.

    Raises:
        ImportError: if the package safetensors is missing.
        ConfigError: the same on every rank, if the first one cannot write.
    """
    from safetensors.torch import save_file

    weights = whole_weights(model, group)
    problem = ""
    if dist.get_rank(group) == 0:
        try:
            save_file(weights, path, metadata={"format": "pt"})
        except Exception as error:  # safetensors raises OSErrors and its own; the others wait
            problem = f"{path} cannot be written: {type(error).__name__}: {error}"
    (problem,) = _from_first([problem], model, group)
    if problem:
        raise ConfigError(problem)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def _from_first(values: list[Any], model: nn.Module, group: dist.ProcessGroup) -> list[Any]:
    """Return the first rank's values on every rank."""
    device = next(model.parameters()).device
    dist.broadcast_object_list(values, group=group, group_src=0, device=device)
    return values


@contextmanager
def _briefly(problem: str) -> Iterator[None]:
    """Raise what DCP says in tracebacks, and not as an Exception, as a line for each rank."""
    try:
        yield
    except CheckpointException as error:
        told = (
            f"  rank {rank}: {type(failure).__name__}: {failure}"
            for rank, (failure, _) in sorted(error.failures.items())
        )
        raise ConfigError("\n".join([problem, *told])) from error


def _found(folder: Path, tensors: Mapping[str, torch.Tensor]) -> tuple[Path | None, str]:
    """Return the newest checkpoint, and why it will not do.

    It raises nothing: one rank looks, and the others wait for what it found.
    """
    newest = None
    try:
        newest = max((path.parent for path in folder.glob("step-*/.metadata")), default=None)
        difference = "" if newest is None else _difference(newest, tensors)
    except Exception as error:  # a broken pickle may raise anything
        told = f"{type(error).__name__}: {error}"
        return newest, f"{newest or folder} cannot be read: {told}; put it right, or remove resume"
    if newest is None:
        return None, (
            f"{folder} holds no checkpoint; set checkpoint_every in the first run, or remove resume"
        )
    if difference:
        return newest, (
            f"{newest} holds another model: {difference}; name that model, or remove resume"
        )
    return newest, ""


def _difference(checkpoint: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the first of a model's tensors that is another in a checkpoint; "" if none is."""
    stored = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    there = {
        name.removeprefix("model."): tuple(entry.size)
        for name, entry in stored.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    here = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            return f"{name} has shape {there.get(name)} there and {here.get(name)} here"
    return ""
