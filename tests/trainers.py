"""What all runs of transformers' Trainer share: plans, rows, a small model, arguments."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from hexiseq_triton.planner import Plan, Split

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

ROW, VOCAB = 48, 97
PLANS = {
    # rank 1 has no token; replicas read two rows and one; rank 4 is idle
    "uneven": Plan.from_splits(
        [Split((40, 0), (5, 3)), Split((56,), (8,))],
        [Split((48,), (8,))],
        sequences=[2, 1],
        num_kv_heads=2,
        world_size=5,
    ),
    "other": Plan.from_splits(
        [Split((24, 24, 24, 36, 36), (3, 1, 1, 1, 2))], sequences=[3], num_kv_heads=2
    ),
}


def rows(count: int, seed: int) -> list[dict[str, list[int]]]:
    """Return rows of random tokens; some labels do not count, and in row 4 none does.

    The first label never counts, but transformers 5.0 divides by it too.
    """
    draw = random.Random(seed)
    ids = [[draw.randrange(1, VOCAB) for _ in range(ROW)] for _ in range(count)]
    made = [{"input_ids": row, "labels": [-100, *row[1:-5], *[-100] * 5]} for row in ids]
    made[4]["labels"] = [-100] * ROW
    return made


def model() -> Any:
    """Return a small Llama with the same random weights everywhere."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=2, head_dim=16, pad_token_id=0,
        attn_implementation="eager",
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def arguments(out: Path, accumulation: int, steps: int, **extra: Any) -> dict[str, Any]:
    """Return the TrainingArguments that all runs share."""
    return {
        "output_dir": str(out), "use_cpu": True, "max_steps": steps, "learning_rate": 1e-2,
        "gradient_accumulation_steps": accumulation, "max_grad_norm": 0.5, "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, "seed": 3,
        "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1,
        "dataloader_pin_memory": False,
    } | extra  # fmt: skip
