"""What the planner's experiments count, and that their page is written from their results."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
from drawn_problems import drawn_layout, drawn_problem

from hexiseq_triton.planner.cost import evaluate
from hexiseq_triton.planner.sight import sight_of
from hexiseq_triton.planner.traffic import kv_exchange

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _bench_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))


@pytest.mark.parametrize("seed", range(10))
def test_bytes_pair_by_pair_are_those_of_the_ports(seed: int) -> None:
    from model_traffic import all_to_all_bytes, exchange_bytes

    rng = Random(seed)
    problem = drawn_problem(rng)
    cost = evaluate(problem, drawn_layout(rng, problem))
    ports = kv_exchange(problem, cost.rows, sight_of(problem, cost.layout, cost.rows).fetches)

    # K and V three times in bf16, dK and dV once in float32: five times what one fetch moves
    moved = exchange_bytes(cost, forwards=2)
    assert np.allclose(moved.sum(axis=0), 5 * (ports.out_in_node + ports.out_across))
    assert np.allclose(moved.sum(axis=1), 5 * (ports.in_in_node + ports.in_across))
    shuffled = all_to_all_bytes(cost, forwards=2)
    assert (shuffled[cost.rows.group[:, None] != cost.rows.group] == 0).all()


def test_the_page_is_the_one_in_docs() -> None:
    from planner_experiments import explained
    from planner_page import PAGE, page

    assert PAGE.read_text(encoding="utf-8") == page(explained())
