"""The training examples run as they stand, on a pool of processes instead of torchrun's."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ROOT, script
from compiling import counted
from pool import Pool

from hexiseq_triton.context import init
from hexiseq_triton.module import HexiSeqAttention
from hexiseq_triton.planner import Plan, Split

EXAMPLES = ROOT / "examples"
PLAN = Plan.from_splits(
    # rank 1 has no token; replicas read two rows and one; rank 4 is idle
    [Split((56, 0), (5, 3)), Split((136,), (8,))],
    [Split((96,), (8,))],
    sequences=[2, 1],
    num_kv_heads=4,
    world_size=5,
)


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    PLAN.save(path)
    return str(path)


def test_plain_pytorch(pool: Pool, plan_file: str, tmp_path: Path) -> None:
    words = (str(EXAMPLES / "fsdp2_llama.py"), "--plan", plan_file, "--steps", "4")
    printed = pool.run(script, str(tmp_path), *words)
    losses = [float(line.split()[-1]) for line in printed[0].splitlines()]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.5
    assert not any(printed[1:])


@pytest.mark.parametrize("name", ["hf_pretrain.py", "hf_sft.py"])
def test_hugging_face(pool: Pool, plan_file: str, tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    for package in ("accelerate", "trl", "datasets"):
        pytest.importorskip(package)
    words = (str(EXAMPLES / name), "--plan", plan_file, "--steps", "2", "--out", "trained")
    pool.run(script, str(tmp_path), *words)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    assert torch.isfinite(saved.lm_head.weight).all()


ALONE = Plan.from_splits(*([Split((96,), (8,))] for _ in range(5)), num_kv_heads=4)
"""Every rank is a replica of its own."""


def compiled(rank: int) -> tuple[int, int, float]:
    """Worker: a step of the example's model as it is, and compiled without a graph break.

    Returns how often attention ran, the graphs, and the largest difference of a gradient.
    """
    calls: list[int] = []
    with init(ALONE, device="cpu") as context, counted() as counters:
        if rank > 0:
            return 0, 0, 0.0
        attention = HexiSeqAttention(context, causal=True)

        def counting(*arguments: Any) -> torch.Tensor:
            calls.append(1)
            return attention(*arguments)

        model = runpy.run_path(str(EXAMPLES / "fsdp2_llama.py"))["Llama"]()
        whole = torch.compile(model, backend="aot_eager", fullgraph=True)
        worst = 0.0
        for lengths in ([40, 56], [30, 30, 36]):
            ids = torch.arange(96) % 64
            bounds = torch.tensor([0, *lengths]).cumsum(0)
            batch = context.shard({"input_ids": ids, "labels": ids}, cu_seqlens=bounds)
            eager, found = (
                gradients(run, batch, attend)
                for run, attend in ((model, counting), (whole, attention))
            )
            for name, gradient in eager.items():
                difference = (found[name] - gradient).abs().max()
                worst = max(worst, float(difference / gradient.abs().max()))
        return len(calls), counters["stats"]["unique_graphs"], worst


def gradients(model: torch.nn.Module, *arguments: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(*arguments).backward()
    named = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name.removeprefix("_orig_mod."): grad.clone() for name, grad in named.items()}


def test_a_rank_alone_compiles_whole_and_attends_once(pool: Pool) -> None:
    calls, graphs, worst = pool.run(compiled)[0]
    assert calls == 2 * 4  # steps and layers: backward runs no attention again
    assert graphs <= 2  # the second takes any number of documents
    assert worst < 1e-5
