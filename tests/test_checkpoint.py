"""Checkpoints go to other plans and numbers of ranks, and weights to other programs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from pool import Pool
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hexiseq_triton import checkpoint
from hexiseq_triton.context import ParallelContext, init
from hexiseq_triton.errors import ConfigError
from hexiseq_triton.planner import Plan, Split

FIVE = Plan.from_splits([Split((40, 0), (5, 3)), Split((56,), (8,))], world_size=5)
THREE = Plan.from_splits([Split((10, 20), (4, 4))], [Split((30,), (8,))])

POSITION = checkpoint.Position(1, 96, "a text")


def whole_model() -> nn.Module:
    """Return a model whose sizes no number of ranks divides, the same everywhere."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.LayerNorm(13), nn.Linear(13, 3, bias=False))


def trained(context: ParallelContext) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a sharded model after one step."""
    model = fully_shard(whole_model(), mesh=context.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 7)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def saved(rank: int, folder: Path) -> dict[str, torch.Tensor]:
    """Worker: save a checkpoint and an export; return the whole weights."""
    with init(FIVE, device="cpu") as context:
        model, optimizer = trained(context)
        checkpoint.save(folder, POSITION, model, optimizer, context.world_group)
        checkpoint.export_safetensors(folder / "export", model, context.world_group)
        return checkpoint.whole_weights(model, context.world_group)


def resumed(rank: int, folder: Path) -> tuple[checkpoint.Position, dict[str, torch.Tensor]]:
    """Worker: resume in another world; return the position and the weights."""
    with init(THREE, device="cpu") as context:
        model = fully_shard(whole_model(), mesh=context.mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        found = checkpoint.resume(folder, POSITION.text, model, optimizer, context.world_group)
        return found, checkpoint.whole_weights(model, context.world_group)


def resumed_from_an_earlier_version(rank: int, folder: Path) -> None:
    """Worker: resume from a checkpoint that has a step and no tokens."""
    with init(THREE, device="cpu") as context:
        model, optimizer = trained(context)
        old = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        group = context.world_group
        dcp.save(old | {"step": 1}, checkpoint_id=folder / "step-00000001", process_group=group)
        checkpoint.resume(folder, POSITION.text, model, optimizer, group)


def test_a_checkpoint_that_counts_no_tokens_is_refused(fresh_pool: Pool, tmp_path: Path) -> None:
    outcomes = fresh_pool.outcomes(resumed_from_an_earlier_version, tmp_path)
    assert {outcome.kind for outcome in outcomes} == {"ConfigError"}
    assert len({outcome.error for outcome in outcomes}) == 1
    assert "does not say how many tokens its run has seen" in outcomes[0].error


def test_another_world_resumes_and_others_read(
    pool: Pool, fresh_pool: Pool, tmp_path: Path
) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    weights, *others = pool.run(saved, tmp_path)
    assert not any(others)
    assert weights["0.weight"].shape == (13, 7)
    position, found = fresh_pool.run(resumed, tmp_path)[0]
    assert position == POSITION
    read = safetensors.load_file(tmp_path / "export")
    for name, weight in weights.items():
        assert torch.equal(found[name], weight)
        assert torch.equal(read[name], weight)
        assert not torch.equal(whole_model().state_dict()[name], weight)


def refused(rank: int, folder: Path) -> str:
    """Worker: what a resumption raises."""
    try:
        resumed(rank, folder)
    except ConfigError as error:
        return str(error)
    return "resumed"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (".metadata", b"cut off", "UnpicklingError"),
        ("__1_0.distcp", None, "FileNotFoundError: "),
    ],
)
def test_a_checkpoint_that_cannot_be_read_is_named_on_every_rank(
    pool: Pool, fresh_pool: Pool, tmp_path: Path, file: str, content: bytes | None, message: str
) -> None:
    pytest.importorskip("safetensors")
    pool.run(saved, tmp_path)
    if content is None:
        (tmp_path / "step-00000001" / file).unlink()
    else:
        (tmp_path / "step-00000001" / file).write_bytes(content)
    found = fresh_pool.run(refused, tmp_path)
    assert len(set(found)) == 1
    assert found[0].startswith(f"resume: {tmp_path}/step-00000001 cannot be read; all hosts must ")
    assert "remove it to go on from the one before" in found[0]
    assert message in found[0]


def saving(rank: int, folder: Path) -> str:
    """Worker: what saving raises."""
    with init(FIVE, device="cpu") as context:
        try:
            checkpoint.save(folder, POSITION, *trained(context), context.world_group)
        except ConfigError as error:
            return str(error)
    return "saved"


def test_a_checkpoint_that_cannot_be_written_is_named_on_every_rank(
    pool: Pool, tmp_path: Path
) -> None:
    (tmp_path / "taken").touch()
    found = pool.run(saving, tmp_path / "taken")
    assert len(set(found)) == 1
    taken = f"checkpoint: {tmp_path}/taken/step-00000001"
    assert found[0].startswith(f"{taken} cannot be written (")
    assert found[0].endswith(", on ranks [0, 1, 2, 3, 4])")


def test_a_checkpoint_that_is_overwritten_in_part_is_none(pool: Pool, tmp_path: Path) -> None:
    pool.run(saving, tmp_path)
    step = tmp_path / "step-00000001"
    assert (step / ".metadata").exists()
    (step / "__1_0.distcp").unlink()
    (step / "__1_0.distcp").mkdir()
    for found in pool.run(saving, tmp_path):
        assert found.startswith(f"checkpoint: {step} cannot be written (IsADirectoryError: ")
        assert found.endswith(", on ranks [1])")
    assert not (step / ".metadata").exists()


def exported_into_nothing(rank: int, folder: Path) -> str:
    """Worker: what an export raises whose folder is not there."""
    with init(FIVE, device="cpu") as context:
        try:
            checkpoint.export_safetensors(folder / "no" / "x", whole_model(), context.world_group)
        except ConfigError as error:
            return str(error)
    return "exported"


def test_an_export_that_cannot_be_written_is_named_on_every_rank(
    pool: Pool, tmp_path: Path
) -> None:
    pytest.importorskip("safetensors")
    found = pool.run(exported_into_nothing, tmp_path)
    assert len(set(found)) == 1
    assert found[0].startswith(f"{tmp_path}/no/x cannot be written: ")


def names_of_wrapped(rank: int) -> list[list[str]]:
    """Worker: the names of the weights of a model in several wrappers."""
    with init(FIVE, device="cpu") as context:
        models = [
            DistributedDataParallel(whole_model(), process_group=context.world_group),
            torch.compile(whole_model(), backend="eager"),
            fully_shard(whole_model(), mesh=context.mesh),
        ]
        return [list(checkpoint.whole_weights(each, context.world_group)) for each in models]


def test_wrappers_do_not_change_the_names_of_weights(pool: Pool) -> None:
    first, *others = pool.run(names_of_wrapped)
    assert first == [list(whole_model().state_dict())] * 3
    assert others == [[[]] * 3] * 4


def test_nothing_optional_is_imported() -> None:
    """The package works where none of the libraries that it plugs into is installed."""
    code = """
import importlib, pkgutil, sys
optional = "transformers accelerate trl datasets deepspeed megatron safetensors"
for name in optional.split():
    sys.modules[name] = None  # an import of it fails
import hexiseq_triton
for name in hexiseq_triton.__all__:
    getattr(hexiseq_triton, name)
for module in pkgutil.iter_modules(hexiseq_triton.__path__):
    importlib.import_module(f"hexiseq_triton.{module.name}")
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
