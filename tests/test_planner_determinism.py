"""Equal inputs give equal plan files, byte for byte."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from drawn_problems import EXAMPLES

from hexiseq_triton.planner import plan

PLAIN = """\
inter_gb_per_s: 25
nodes:
- {name: a, gpus: {H100-SXM: 2, L40S: 2}}
- {gpus: {L40S: 1}, name: b}
"""
SHUFFLED = """\
nodes:
- {gpus: {L40S: 2, H100-SXM: 2}, name: a}
- {name: b, gpus: {L40S: 1}}
inter_gb_per_s: 25
"""
PROGRAM = """\
import sys
from hexiseq_triton.planner import plan
print(plan(sys.argv[1], "3b", seq_len=30000).to_json(), end="")
"""


def test_neither_hash_seed_nor_threads_nor_order_of_keys_change_a_byte(tmp_path: Path) -> None:
    """`bench/planner_experiments.py` adds numba's cache, empty and filled."""
    (tmp_path / "plain.yaml").write_text(PLAIN, encoding="utf-8")
    (tmp_path / "shuffled.yaml").write_text(SHUFFLED, encoding="utf-8")
    here = plan(tmp_path / "plain.yaml", "3b", seq_len=30000).to_json()

    for seed, threads, name in ((1, 1, "plain"), (2, 4, "shuffled")):
        environment = os.environ | {
            "PYTHONHASHSEED": str(seed),
            "OMP_NUM_THREADS": str(threads),
            "NUMBA_NUM_THREADS": str(threads),
        }
        command = [sys.executable, "-c", PROGRAM, f"{name}.yaml"]
        ran = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, check=True, text=True
        )
        assert ran.stdout == here


def test_a_plan_does_not_depend_on_those_made_before() -> None:
    example = EXAMPLES / "2-fast-2-slow.yaml"
    first = plan(example, "tiny", seq_len=4096).to_json()
    plan(example, "tiny", seq_len=2048)

    assert plan(example, "tiny", seq_len=4096).to_json() == first
