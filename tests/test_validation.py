"""The runs that the simulator is validated with: their plans, and what is written of them."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool

BENCH = Path(__file__).parents[1] / "bench"
SHAPE = {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 2, "ffn": 32, "vocab": 32}
RING = [[[[0], [24], [2]], [[1], [8], [2]]]]  # other ranks are idle
LINK_GB_PER_S = 2e-5


def bench(name: str) -> ModuleType:
    """Return a module of bench."""
    if str(BENCH) not in sys.path:
        sys.path.append(str(BENCH))
    return importlib.import_module(name)


@pytest.mark.parametrize("world", [2, 4])
def test_the_plans_are_many_and_can_be_carried_out(world: int) -> None:
    cases = bench("validation_cases")
    lines, sms = cases.read_cases(world)

    assert len(lines) >= 20
    assert len({line["case"] for line in lines}) == len(lines)
    assert sum("link_gb_per_s" in line for line in lines) >= 6
    assert sum(line["level"] == "step" for line in lines) >= 12  # which have their memory measured
    assert min(sms) < max(sms)
    assert len(sms) == world
    for line in lines:
        plan = cases.plan_of(line, len(sms))
        assert plan.seq_len == line["seq_len"]
        assert (plan.num_heads, plan.num_kv_heads) == (32, 8)


@pytest.fixture
def plans(tmp_path: Path) -> Path:
    common = {"seq_len": 32, "replicas": RING}
    plans = [
        common | {"case": "whole", "level": "step", "recompute": "full"},
        common
        | {"case": "slow", "level": "layer", "recompute": "none"}
        | {"link_gb_per_s": LINK_GB_PER_S},
    ]
    content = {
        "model": SHAPE,
        "chunk_tokens": 16,
        "window": 1,
        "ranks": {"5": {"emulate_sms": [], "plans": plans}},
    }
    path = tmp_path / "plans.json"
    path.write_text(json.dumps(content))
    return path


def measured(rank: int, plans: Path, out: Path) -> list[str]:
    """Worker: measure what was not begun before; return the names."""
    runs = bench("validation_runs")
    options = argparse.Namespace(out=out, name="test", samples=1, patience=60.0)
    cases, _ = runs.read_cases(5, plans)
    found = runs.Runs(options, torch.device("cpu"), [""] * dist.get_world_size())
    done = []
    for case in found.left(cases):
        found.measure(case)
        done.append(case["case"])
    return done


def test_what_was_measured_is_written_and_not_measured_again(
    pool: Pool, plans: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run.jsonl"
    (tmp_path / "run.jsonl.started").write_text("another\n")

    assert pool.run(measured, plans, out) == [["whole", "slow"]] * 5
    assert pool.run(measured, plans, out) == [[]] * 5

    whole, slow = (json.loads(line) for line in out.read_text().splitlines())
    assert (whole["run"], whole["level"], whole["card"]) == ("test", "step", "5x cpu")
    assert (slow["case"], slow["level"]) == ("slow", "layer")
    for line in (whole, slow):
        assert line["samples_ms"] == [line["measured_ms"]]
        assert all(phases["attention"] > 0 for phases in line["phases"][:2])
        assert line["phases"][0]["exchange"] > 0
    # rank 0 gets keys and values of 8 tokens twice, and gradients of the 12 that rank 1 sees
    received = (2 * 8 + 12) * 2 * 2 * 8 * 4
    assert slow["measured_ms"] > received / (LINK_GB_PER_S * 1e9) * 1e3


def parts(rank: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Worker: lines of kernels and links."""
    cases, found = bench("validation_cases"), bench("validation_parts")
    device = torch.device("cpu")
    spec = cases.model_of({"model": SHAPE})
    return found.kernel_lines(spec, device), list(found.link_lines(device))


def test_kernels_and_links_are_measured_by_rank_and_pair(pool: Pool) -> None:
    results = pool.run(parts)

    for rank, (kernels, links) in enumerate(results):
        assert {next(iter(line["flops"])) for line in kernels} == {
            "gemm_forward",
            "gemm_backward",
            "attention_forward",
            "attention_backward",
        }
        assert all(line["rank"] == rank and line["measured_ms"] > 0 for line in kernels)
        assert links == results[0][1]
        assert len({(line["sender"], line["receiver"]) for line in links}) == 10
