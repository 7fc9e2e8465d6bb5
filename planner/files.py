"""Read YAML and JSON files into checked dataclasses; name file, field, value and what fits."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from hexiseq_triton.errors import ConfigError

FILE_CONFIG = ConfigDict(extra="forbid", allow_inf_nan=False)
"""Pydantic's settings for every noun that can come from a file."""

T = TypeVar("T")


def _no_bool(content: Any) -> Any:
    if isinstance(content, bool):
        raise ValueError("a number is needed")  # YAML reads yes, no, on and off as bool
    return content


Positive = Annotated[float, Field(gt=0), BeforeValidator(_no_bool)]
"""A number above 0 in a file; finite, as FILE_CONFIG asks."""
Count = Annotated[int, Field(ge=1), BeforeValidator(_no_bool)]
"""A whole number from 1 in a file."""


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a key that stands twice in one mapping is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        _check_unique(keys, f" in the mapping from line {node.start_mark.line + 1} on")
        return super().construct_mapping(node, deep)


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _check_unique(key for key, _ in pairs)
    return dict(pairs)


def _check_unique(keys: Iterable[str], where: str = "") -> None:
    twice = [key for key, times in Counter(keys).items() if times > 1]
    if twice:
        raise ValueError(f"key {', '.join(twice)} stands twice{where}; remove one")


def read_mapping(path: str | Path) -> dict[str, Any]:
    """Return the mapping a YAML or JSON file holds.

    Raises:
        ConfigError: if the file is missing, is no YAML or JSON, repeats a key, or holds no mapping.
    """
    path = Path(path)
    text = read_text(path)
    try:
        content = _parsed(text, path.suffix == ".json")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        message = " ".join(str(error).split())
        raise ConfigError(f"{path}: is no valid {path.suffix or 'YAML'}: {message}") from error
    if not isinstance(content, dict):
        held = "nothing" if content is None else type(content).__name__
        raise ConfigError(f"{path}: holds {held}; a mapping of fields is needed")
    return content


def read_text(path: str | Path) -> str:
    """Return the text of a file.

    Raises:
        ConfigError: if the file is missing or is no text.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is no text in UTF-8: {error.reason}") from error


def _parsed(text: str, is_json: bool) -> Any:
    if is_json:
        return json.loads(text, object_pairs_hook=_unique_pairs)
    return yaml.load(text, _UniqueKeys)


_SHAPES = {
    "tuple_type": "a list is needed",
    "dict_type": "a mapping of names is needed",
    "dataclass_type": "a mapping of fields is needed",
    "invalid_key": "a field's name must be text",
}
"""What to say of a wrong shape, where pydantic names Python's types."""


def build(kind: type[T], content: object, source: str = "") -> T:
    """Return `content` as a checked `kind`; `source` names the file in errors, if it is one.

    Raises:
        ConfigError: one line a wrong field: the field, its value, what fits.
    """
    try:
        return TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        raise ConfigError("\n".join(_lines(error, source))) from error


def in_a_line(kind: type[T]) -> type[T]:
    """Decorate a pydantic dataclass: its constructor raises a ConfigError of one line.

    What `build` makes does not pass through the constructor, nested nouns included.
    """
    construct = kind.__init__
    names = [each.name for each in fields(kind)]  # type: ignore[arg-type]

    @wraps(construct)
    def __init__(self: T, *args: Any, **kwargs: Any) -> None:
        try:
            construct(self, *args, **kwargs)
        except ValidationError as error:
            raise ConfigError("; ".join(_lines(error, kind.__name__, names))) from error

    kind.__init__ = __init__  # type: ignore[method-assign, assignment]
    return kind


def _lines(error: ValidationError, source: str, names: Sequence[str] = ()) -> list[str]:
    """Return one line a wrong field; `names` are those of arguments that are told by place."""
    lines = []
    where = f"{source}: " if source else ""
    for fault in error.errors(include_url=False):
        if fault["type"] == "default_factory_not_called":
            continue  # a consequence of another wrong field
        place = list(fault["loc"])
        if names and place and isinstance(place[0], int) and place[0] < len(names):
            place[0] = names[place[0]]
        field = ".".join(str(part) for part in place) or "the file"
        message = _SHAPES.get(fault["type"], fault["msg"].removeprefix("Value error, "))
        if fault["type"] == "missing":
            lines.append(f"{where}{field} is missing")
        elif fault["type"] == "unexpected_keyword_argument":
            lines.append(f"{where}{field} is no field here; remove it or correct its name")
        elif fault["type"] == "unexpected_positional_argument":
            lines.append(f"{where}{fault['input']!r} is one argument too many; give it by name")
        elif fault["type"] == "value_error" and not fault["loc"]:
            lines.append(f"{where}{message}")  # of fields that contradict each other
        elif isinstance(fault["input"], dict | list | tuple):
            lines.append(f"{where}{field}: {message}")
        else:
            lines.append(f"{where}{field} is {fault['input']!r}: {message}")
    return lines
