"""The README's examples run: the first by torchrun, as the README says, the others as written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import commands
from commands import ROOT, blocks, lines
from pool import Pool

from hexiseq_triton.planner import Plan, Split

README = ROOT / "README.md"
BLOCKS = blocks(README)


def test_the_quickstart_runs_as_written() -> None:
    script = ROOT / "examples" / "quickstart.py"
    assert BLOCKS[1] == ("python", script.read_text())
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", script]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr
    # four processes share one output, where the ends of their lines may mix
    found = re.findall(r"rank (\d): \((\d+), 8, 16\), labels \((\d+),\)", ran.stdout)
    assert sorted(rank for rank, _, _ in found) == ["0", "1", "2", "3"]
    assert all(tokens == labels for _, tokens, labels in found)
    counts = [int(tokens) for _, tokens, _ in found]
    assert sum(counts) == 4096
    assert len(set(counts)) > 1


def test_the_cluster_file_becomes_a_plan_and_a_launch(tmp_path: Path) -> None:
    (yaml, cluster), (bash, content) = BLOCKS[2:4]
    assert (yaml, bash) == ("yaml", "bash")
    (tmp_path / "cluster.yaml").write_text(cluster)
    plan, simulate, launch, train = lines(content)
    commands.run(plan, tmp_path)
    assert {share.gpu for share in Plan.load(tmp_path / "plan.json").shares} == {
        "H100-SXM",
        "my-card",
    }
    assert "tokens/s" in commands.run(simulate, tmp_path)
    assert "torchrun" in commands.run(launch, tmp_path)
    commands.parse(train)  # it would train eight billion parameters


GIVEN = """
import torch
from torch.distributed.fsdp import fully_shard
import hexiseq_triton as hx
from hexiseq_triton.planner import Plan

torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
ids = labels = torch.arange(100)
cu_seqlens = torch.tensor([0, 30, 100])
tokens = Plan.load("plan.json").shares[torch.distributed.get_rank()].tokens
q, k, v = (torch.randn(tokens, heads, 16) for heads in (8, 4, 4))
loss_sum, num_tokens = torch.tensor(2.0 * tokens), tokens
"""
"""What the README leaves to the reader's own loop."""


def test_your_own_loop(tmp_path: Path) -> None:
    splits = [Split((40, 24), (5, 3)), Split((36,), (8,))]
    Plan.from_splits(splits, num_kv_heads=4).save(tmp_path / "plan.json")
    kind, content = BLOCKS[4]
    assert kind == "python"
    (tmp_path / "loop.py").write_text(
        f"{GIVEN}\n{content}\nprint(tuple(o.shape), tuple(batch['labels'].shape), loss.item())"
    )
    with Pool(3) as pool:
        found = pool.run(commands.script, str(tmp_path), "loop.py")
    assert found == [f"({n}, 8, 16) ({n},) 2.0\n" for n in (40, 24, 36)]


def test_its_other_block_names_make_targets() -> None:
    assert len(BLOCKS) == 5  # the other four run above
    for line in lines(BLOCKS[0][1]):
        commands.parse(line)
