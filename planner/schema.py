"""JSON schemas of the files users write and read, for editors and other programs.

They say what may stand in a file, not all that is checked when it is loaded: known names, sums that
agree, nodes that reach each other.
"""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from hexiseq_triton.planner.clusters import ClusterFile
from hexiseq_triton.planner.gpus import GpuFile
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.plans import Plan

SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"
FILES: dict[str, Any] = {
    "cluster": ClusterFile,
    "gpus": GpuFile,
    "model": ModelSpec,
    "plan": Plan,
}
"""What each kind of file is read into."""


def json_schema(kind: Any, title: str) -> dict[str, Any]:
    """Return the JSON schema of a file that is read into `kind`.

    Fields whose default depends on other fields are not required, and have no default here.
    """
    schema = TypeAdapter(kind).json_schema(mode="validation")
    if kind is Plan:
        schema["properties"]["digest"] = {
            "type": "string",
            "description": "SHA-256 of the rest; an edited plan is refused",
        }
        schema["required"] = sorted([*schema["required"], "digest"])
    return {"$schema": SCHEMA_DIALECT} | schema | {"title": title}
