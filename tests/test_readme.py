"""The README's example is the file in examples/, and runs as the README says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_quickstart_runs_as_written() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    script = ROOT / "examples" / "quickstart.py"
    assert blocks[0] == script.read_text()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", script]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    # four processes share one output, where the ends of their lines may mix
    found = re.findall(r"rank (\d): \((\d+), 8, 16\), labels \((\d+),\)", ran.stdout)
    assert sorted(rank for rank, _, _ in found) == ["0", "1", "2", "3"]
    assert all(tokens == labels for _, tokens, labels in found)
    counts = [int(tokens) for _, tokens, _ in found]
    assert sum(counts) == 4096
    assert len(set(counts)) > 1
