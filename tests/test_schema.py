"""JSON schemas say what the examples hold, and refuse what loading refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from hexiseq_triton.cli import app
from hexiseq_triton.planner.gpus import TABLE
from hexiseq_triton.planner.models import PRESETS
from hexiseq_triton.planner.plans import Plan, Split

jsonschema = pytest.importorskip("jsonschema")
EXAMPLES = Path(__file__).parents[1] / "examples"


def schema(file: str) -> Any:
    """Return a validator of what `hexiseq schema` prints."""
    result = CliRunner().invoke(app, ["schema", file])
    assert result.exit_code == 0, result.stderr
    content = json.loads(result.stdout)
    jsonschema.Draft202012Validator.check_schema(content)
    return jsonschema.Draft202012Validator(content)


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_example_clusters_and_the_training_file_are_valid() -> None:
    validator = schema("cluster")
    files = sorted((EXAMPLES / "clusters").glob("*.yaml"))
    assert len(files) >= 4
    for file in files:
        validator.validate(read(file))
    schema("training").validate(read(EXAMPLES / "train.yaml"))


def test_the_gpu_table_and_the_presets_are_valid() -> None:
    schema("gpus").validate(read(TABLE))
    validator = schema("model")
    for preset in read(PRESETS).values():
        validator.validate(preset)


def test_a_plan_file_is_valid_and_needs_its_digest() -> None:
    plan = Plan.from_splits([Split((5, 3), (1, 1))], [Split((8,), (2,))])
    content = json.loads(plan.to_json())
    validator = schema("plan")

    validator.validate(content)
    del content["digest"]
    assert not validator.is_valid(content)


NODE = {"name": "a", "gpus": ["L4"]}


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("cluster", {"nodes": [NODE | {"gpus": {"L4": 0}}]}),
        ("cluster", {"nodes": [NODE | {"count": 0}]}),
        ("cluster", {"nodes": [NODE | {"intra_gb_per_s": -1}]}),
        ("cluster", {"nodes": [NODE | {"bandwidth": 1}]}),
        ("cluster", {"nodes": [{"name": "a"}]}),
        ("cluster", {}),
        ("gpus", {"gpus": {"x": {"memory_gb": 1}}}),
        ("gpus", {"gpus": {"x": {"dense_tflops": "much", "memory_gb": 1}}}),
        ("gpus", {"gpus": {"x": {"dense_tflops": {"origin": "spec"}, "memory_gb": 1}}}),
        ("model", {"layers": 0, "hidden": 8, "heads": 2, "ffn": 8, "vocab": 8}),
        ("model", {"layers": 1, "hidden": 8, "heads": 2, "ffn": 8}),
    ],
)
def test_mistakes_are_seen(file: str, content: dict[str, Any]) -> None:
    assert not schema(file).is_valid(content)


def test_unknown_files_are_told_what_there_is() -> None:
    result = CliRunner().invoke(app, ["schema", "clusters"])

    assert result.exit_code == 2
    assert "one of cluster, gpus, model, plan, training" in result.stderr
