"""What all runs of `hexiseq train` share in the tests: plans, a configuration, workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pool import TIMEOUT, Pool

from hexiseq_triton.planner import Plan, Split
from hexiseq_triton.train import train
from hexiseq_triton.training_config import CorpusOptions, TrainingConfig

MODEL = "{layers: 2, hidden: 32, heads: 4, kv_heads: 2, ffn: 48, vocab: 256}"
UNEVEN = [Split((100, 0, 37), (2, 1, 1)), Split((119,), (4,))]
"""Two groups of 3 and 1 ranks; rank 1 holds no token. In a world of 5, rank 4 is idle."""


def uneven_plan(accumulation: int = 1) -> Plan:
    return Plan.from_splits(UNEVEN, num_kv_heads=2, world_size=5, accumulation=accumulation)


def replicas_plan(accumulation: int = 1) -> Plan:
    """Two replicas: three sequences on 2 + 1 ranks, one sequence on 2 ranks."""
    return Plan.from_splits(
        [Split((150, 50), (3, 1)), Split((190,), (4,))],
        [Split((99, 31), (1, 3))],
        num_kv_heads=2,
        sequences=(3, 1),
        accumulation=accumulation,
    )


def config_in(tmp_path: Path) -> TrainingConfig:
    model = tmp_path / "model.yaml"
    model.write_text(MODEL, encoding="utf-8")
    return TrainingConfig(
        model=str(model),
        steps=3,
        lr=2e-3,
        warmup_steps=1,
        max_grad_norm=0.5,
        out=str(tmp_path / "out"),
        timeout_seconds=TIMEOUT.total_seconds(),
        corpus=CorpusOptions(max_document_tokens=300),
    )


def trained(rank: int, plan: Plan, config: TrainingConfig) -> list[Any]:
    """Worker: `train` on the CPU."""
    return train(plan, config, device="cpu")


def same_refusal(pool: Pool, plan: Plan, config: TrainingConfig) -> str:
    """Return the ConfigError that every rank raised."""
    outcomes = pool.outcomes(trained, plan, config)
    assert {outcome.kind for outcome in outcomes} == {"ConfigError"}
    assert len({outcome.error for outcome in outcomes}) == 1
    return outcomes[0].error
