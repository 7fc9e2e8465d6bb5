"""Read YAML and JSON files into checked dataclasses; name file, field, value and what fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from hexiseq_triton.errors import ConfigError

FILE_CONFIG = ConfigDict(extra="forbid", allow_inf_nan=False)
"""Pydantic's settings for every noun that can come from a file."""

T = TypeVar("T")


def read_mapping(path: str | Path) -> dict[str, Any]:
    """Return the mapping a YAML or JSON file holds.

    Raises:
        ConfigError: if the file is missing, is no YAML or JSON, or holds no mapping.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: is no valid {path.suffix or 'YAML'}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: holds {type(content).__name__}; a mapping of fields is needed")
    return content


def build(kind: type[T], content: object, source: str) -> T:
    """Return `content` as a checked `kind`; `source` names the file in errors.

    Raises:
        ConfigError: one line a wrong field: the field, its value, what fits.
    """
    try:
        return TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        raise ConfigError("\n".join(_lines(error, source))) from error


def _lines(error: ValidationError, source: str) -> list[str]:
    lines = []
    for fault in error.errors(include_url=False):
        if fault["type"] == "default_factory_not_called":
            continue  # a consequence of another wrong field
        field = ".".join(str(part) for part in fault["loc"]) or "the file"
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "missing":
            lines.append(f"{source}: {field} is missing")
        elif fault["type"] == "unexpected_keyword_argument":
            lines.append(f"{source}: {field} is no field here; remove it or correct its name")
        elif isinstance(fault["input"], dict | list | tuple):
            lines.append(f"{source}: {field}: {message}")
        else:
            lines.append(f"{source}: {field} is {fault['input']!r}: {message}")
    return lines
