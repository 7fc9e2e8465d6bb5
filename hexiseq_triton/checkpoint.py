"""Save and resume training with torch.distributed.checkpoint (DCP), one folder a checkpoint.

DCP writes shards and reads them back under any number of ranks, so a run may go on under another
plan. Its `.metadata` file is written last: a folder without one is no checkpoint.

For other programs the weights alone can be gathered and written whole:

    export_safetensors(path, model, context.world_group)                   # one file
    weights = whole_weights(model, context.world_group)                    # a transformers model
    if context.rank == 0: model.save_pretrained(folder, state_dict=weights)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from hexiseq_triton.errors import ConfigError


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup,
) -> None:
    """Write the state after `step` steps; a collective call of all ranks."""
    state = _state(model, optimizer) | {"step": step}
    dcp.save(state, checkpoint_id=folder / f"step-{step:08d}", process_group=group)


def resume(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup
) -> int:
    """Load the newest checkpoint that the first rank finds; return its step.

    Raises:
        ConfigError: the same on every rank, if there is no checkpoint or it is another model's.
    """
    state = _state(model, optimizer) | {"step": 0}
    found: list[Any] = [None, ""]
    if dist.get_rank(group) == 0:
        found[0] = _newest(folder)
        found[1] = "" if found[0] is None else _difference(found[0], state["model"])
    device = next(model.parameters()).device
    dist.broadcast_object_list(found, group=group, group_src=0, device=device)
    if found[1]:
        raise ConfigError(
            f"resume: {found[0]} holds another model: {found[1]}; name that model, or remove resume"
        )
    if found[0] is None:
        raise ConfigError(
            f"resume: {folder} holds no checkpoint; set checkpoint_every in the first run, or "
            "remove resume"
        )
    dcp.load(state, checkpoint_id=found[0], process_group=group)
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
    for name, tensor in model.state_dict().items():
        gathered = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if first:
            whole[name] = gathered.detach().cpu().clone()
    return whole


def export_safetensors(path: Path, model: nn.Module, group: dist.ProcessGroup) -> None:
    """Write all weights as one safetensors file; a collective call of all ranks of `group`.

    Raises:
        ImportError: if the package safetensors is missing.
    """
    from safetensors.torch import save_file

    weights = whole_weights(model, group)
    if weights:
        save_file(weights, path, metadata={"format": "pt"})


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def _newest(folder: Path) -> Path | None:
    return max((path.parent for path in folder.glob("step-*/.metadata")), default=None)


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
