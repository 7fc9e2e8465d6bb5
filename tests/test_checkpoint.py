"""Checkpoints go to other plans and numbers of ranks, and weights to other programs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pool import Pool
from torch import nn
from torch.distributed.fsdp import fully_shard

from hexiseq_triton import checkpoint
from hexiseq_triton.context import ParallelContext, init
from hexiseq_triton.planner import Plan, Split

FIVE = Plan.from_splits([Split((40, 0), (5, 3)), Split((56,), (8,))], world_size=5)
THREE = Plan.from_splits([Split((10, 20), (4, 4))], [Split((30,), (8,))])


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
        checkpoint.save(folder, 1, model, optimizer, context.world_group)
        checkpoint.export_safetensors(folder / "export", model, context.world_group)
        return checkpoint.whole_weights(model, context.world_group)


def resumed(rank: int, folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """Worker: resume in another world; return the number and the weights."""
    with init(THREE, device="cpu") as context:
        model = fully_shard(whole_model(), mesh=context.mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        step = checkpoint.resume(folder, model, optimizer, context.world_group)
        return step, checkpoint.whole_weights(model, context.world_group)


def test_another_world_resumes_and_others_read(
    pool: Pool, fresh_pool: Pool, tmp_path: Path
) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    weights, *others = pool.run(saved, tmp_path)
    assert not any(others)
    assert weights["0.weight"].shape == (13, 7)
    step, found = fresh_pool.run(resumed, tmp_path)[0]
    assert step == 1
    read = safetensors.load_file(tmp_path / "export")
    for name, weight in weights.items():
        assert torch.equal(found[name], weight)
        assert torch.equal(read[name], weight)
        assert not torch.equal(whole_model().state_dict()[name], weight)


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
