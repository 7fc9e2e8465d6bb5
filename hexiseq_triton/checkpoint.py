"""Save and resume training with torch.distributed.checkpoint (DCP), one folder a checkpoint.

DCP writes shards and reads them back under any number of ranks, so a run may go on under another
plan. Its `.metadata` file is written last: a folder without one is no checkpoint. All ranks must
see the same files: with several hosts the folder lies on a file system that they share.

A checkpoint says how many tokens of which text the run has seen, and not only its step: under
another plan a step may be another number of tokens.

For other programs the weights alone can be gathered and written whole:

    export_safetensors(path, model, context.world_group)                   # one file
    weights = whole_weights(model, context.world_group)                    # a transformers model
    if context.rank == 0: model.save_pretrained(folder, state_dict=weights)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True)
class Position:
    """How far a run is: optimizer steps, and tokens of a text.

    `text` names what is read, and in which order: tokens of one say nothing of another.
    """

    step: int
    tokens: int
    text: str


def save(
    folder: Path,
    position: Position,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup,
) -> None:
    """Write the state at `position`; a collective call of all ranks.

    Raises:
        ConfigError: the same on every rank, if one of them cannot write.
    """
    state = _state(model, optimizer) | asdict(position)
    checkpoint = folder / name_of(position.step)
    if dist.get_rank(group) == 0:
        # an earlier run's: while it is overwritten the folder is no checkpoint. DCP plans on this
        # rank before any rank writes, and says itself what is wrong with the folder
        with suppress(OSError):
            (checkpoint / ".metadata").unlink()
    with _explained(f"checkpoint: {checkpoint} cannot be written"):
        dcp.save(state, checkpoint_id=checkpoint, process_group=group)


def resume(
    folder: Path,
    text: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup,
) -> Position:
    """Load the newest checkpoint that the first rank finds; return how far it is.

    Args:
        folder: where this rank sees the checkpoints.
        text: names what the run reads on.
        model: takes the weights.
        optimizer: takes its state.
        group: all ranks.

    Raises:
        ConfigError: the same on every rank, if there is no checkpoint, it cannot be read, or it is
            another model's or another text's.
    """
    state = _state(model, optimizer) | asdict(Position(0, 0, text))
    found: list[Any] = ["", ""]
    if dist.get_rank(group) == 0:  # whatever happens here, the others wait to be told
        try:
            found[0] = _newest(folder)
            found[1] = _difference(folder / found[0], state["model"])
        except Exception as error:
            known = isinstance(error, ConfigError)
            found[1] = str(error) if known else f"{_unreadable(folder / found[0])} ({error!r})"
    name, problem = _from_first(found, model, group)
    if problem:
        raise ConfigError(f"resume: {problem}")
    checkpoint = folder / name
    with _explained(f"resume: {_unreadable(checkpoint)}"):
        dcp.load(state, checkpoint_id=checkpoint, process_group=group)
    position = Position(state["step"], state["tokens"], state["text"])
    if position.text != text:
        raise ConfigError(
            f"resume: {checkpoint} stands at token {position.tokens} of another text "
            f"({position.text}; here {text}); give its documents and seed, or begin another run: "
            "another out, without resume"
        )
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return position


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


def name_of(step: int) -> str:
    """Return what the folder of a checkpoint is called."""
    return f"step-{step:08d}"


def checkpoints_in(folder: Path) -> list[str]:
    """Return the names of all whole checkpoints in a folder, the oldest first."""
    return sorted(path.parent.name for path in folder.glob("step-*/.metadata"))


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn DCP's error, which all ranks raise, into one that says what to do."""
    try:
        yield
    except CheckpointException as error:
        ranks_of: dict[str, list[int]] = {}
        for rank, (reason, _) in sorted(error.failures.items()):
            ranks_of.setdefault(f"{type(reason).__name__}: {reason}", []).append(rank)
        listed = (f"{reason}, on ranks {ranks}" for reason, ranks in ranks_of.items())
        raise ConfigError(f"{what} ({'; '.join(listed)})") from error


def _newest(folder: Path) -> str:
    """Return the name of the newest checkpoint.

    Raises:
        ConfigError: if there is none.
    """
    found = checkpoints_in(folder)
    if not found:
        raise ConfigError(
            f"{folder} holds no checkpoint; set checkpoint_every in the first run, and begin it "
            "again without resume, in another out"
        )
    return found[-1]


def _unreadable(checkpoint: Path) -> str:
    return (
        f"{checkpoint} cannot be read; all hosts must see its files: if they do, it is damaged, "
        "remove it to go on from the one before"
    )


def _difference(checkpoint: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """Return why a checkpoint is none of a model with these tensors; "" if it is one."""
    stored = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    there = {
        name.removeprefix("model."): tuple(entry.size)
        for name, entry in stored.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    here = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            return (
                f"{checkpoint} holds another model: {name} has shape {there.get(name)} there and "
                f"{here.get(name)} here; name that model, or begin another run: another out, "
                "without resume"
            )
    if "tokens" not in stored:
        return (
            f"{checkpoint} does not say how many tokens its run has seen, as those of an earlier "
            "version; begin another run: another out, without resume"
        )
    return ""
