"""Plans that the simulator is validated with, as data: fixed before anything was measured.

`validation_plans.json` has the model and, for four ranks and for two, their multiprocessors and the
plans. A case is one of the plans with all that is common to them, and a line of results is a case
with what was measured; `validate_simulator` lists the fields.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hexiseq_triton.errors import ConfigError
from hexiseq_triton.planner import ExchangePlan, ModelSpec, Plan, Split
from hexiseq_triton.planner.files import build

PLANS = Path(__file__).resolve().parent / "validation_plans.json"
Line = dict[str, Any]


def read_cases(world_size: int, path: Path = PLANS) -> tuple[list[Line], list[int]]:
    """Return the cases for so many ranks in their order, and the multiprocessors of each rank."""
    content = json.loads(path.read_text(encoding="utf-8"))
    ranks = content.pop("ranks")
    if str(world_size) not in ranks:
        raise ConfigError(f"{path} has plans for {' and '.join(ranks)} ranks, not for {world_size}")
    own = ranks[str(world_size)]
    return [plan | content for plan in own["plans"]], own["emulate_sms"]


def model_of(line: Line) -> ModelSpec:
    """Return the model of a case or a line: a preset's name, a file, or the shape itself."""
    model = line["model"]
    return ModelSpec.load(model) if isinstance(model, str) else build(ModelSpec, model, "model")


def plan_of(line: Line, world_size: int) -> Plan:
    """Return the plan of a case or a line; ranks that it doesn't name are idle."""
    spec = model_of(line)
    return Plan.from_splits(
        *(
            [Split(tuple(tokens), tuple(heads), tuple(ranks)) for ranks, tokens, heads in groups]
            for groups in line["replicas"]
        ),
        num_kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        world_size=world_size,
        exchange=ExchangePlan(chunk_tokens=line["chunk_tokens"], window=line["window"]),
    )
