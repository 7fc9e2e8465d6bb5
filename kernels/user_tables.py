"""Launch choices that `hexiseq tune` measured on the user's own cards.

They stand in one YAML file, one section for each card and Triton version, and come before the
built-in choices on exactly that card and version:

    $HEXISEQ_LAUNCH_TABLES, or $XDG_CONFIG_HOME/hexiseq_triton/launch_tables.yaml (~/.config/...)

docs/tuning.md shows a file. It is read at the first launch on a card, once a process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
import triton
import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from hexiseq_triton.errors import ConfigError
from hexiseq_triton.kernels.configs import Config

PATH_VARIABLE = "HEXISEQ_LAUNCH_TABLES"
HEADER = "# Launch tables of hexiseq_triton, written by `hexiseq tune`.\n"
FIRST_WITH_DESCRIPTORS = 90  # sm_90: the copy engine that reads tensor descriptors
_ELEMENT_BYTES = 2
_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)

logger = logging.getLogger(__name__)


class Card(NamedTuple):
    """What a measurement is good for: this model of card, under this Triton."""

    name: str
    arch: str
    shared_memory_bytes: int
    triton: str

    @classmethod
    def of(cls, device: torch.device) -> Card:
        """Return the card of a CUDA device."""
        properties = torch.cuda.get_device_properties(device)
        arch = f"sm_{properties.major}{properties.minor}"
        shared = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
        return cls(properties.name, arch, shared, triton.__version__)

    @property
    def has_descriptors(self) -> bool:
        return int(self.arch.removeprefix("sm_")) >= FIRST_WITH_DESCRIPTORS


Block = Literal[16, 32, 64, 128, 256]
HeadDim = Literal[64, 128, 256]
TableName = Literal["forward", "grad_kv", "grad_q"]


@dataclass(frozen=True, config=_STRICT)
class Entry:
    """One choice as the file holds it: a `Config`, and the milliseconds it was measured with."""

    block_m: Block
    block_n: Block
    num_warps: Literal[1, 2, 4, 8, 16]
    num_stages: Annotated[int, Field(ge=1, le=8)]
    descriptors: bool = False
    programs_per_sm: Annotated[int, Field(ge=0, le=32)] = 0
    milliseconds: Annotated[float, Field(gt=0)] | None = None

    @classmethod
    def of(cls, config: Config, milliseconds: float) -> Entry:
        return cls(**asdict(config), milliseconds=round(milliseconds, 4))

    @property
    def config(self) -> Config:
        return Config(**{field.name: getattr(self, field.name) for field in fields(Config)})


@dataclass(frozen=True, config=_STRICT)
class Section:
    """What was measured on one card under one version of Triton."""

    card: str
    arch: Annotated[str, Field(pattern=r"^sm_\d+$")]
    shared_memory_bytes: Annotated[int, Field(gt=0)]
    triton: str
    tables: dict[TableName, dict[HeadDim, Entry]]

    @classmethod
    def of(cls, card: Card, tables: dict[TableName, dict[HeadDim, Entry]]) -> Section:
        """Return the section of a card."""
        return cls(*card, tables)

    @property
    def measured_on(self) -> Card:
        return Card(self.card, self.arch, self.shared_memory_bytes, self.triton)

    def updated(self, newer: Section) -> Section:
        """Return the section with the entries of a newer one of the same card put in."""
        names = dict.fromkeys((*self.tables, *newer.tables))
        tables = {n: {**self.tables.get(n, {}), **newer.tables.get(n, {})} for n in names}
        return Section.of(self.measured_on, tables)

    @model_validator(mode="after")
    def _is_possible(self) -> Section:
        for name, entries in self.tables.items():
            for head_dim, entry in entries.items():
                where = f"{name}, head dimension {head_dim}"
                if entry.descriptors and not self.measured_on.has_descriptors:
                    raise ValueError(
                        f"{where}: descriptors need sm_{FIRST_WITH_DESCRIPTORS}; "
                        f"{self.card} is {self.arch}"
                    )
                # the least that any kernel holds: one block of the longer side
                block_bytes = max(entry.block_m, entry.block_n) * head_dim * _ELEMENT_BYTES
                if block_bytes > self.shared_memory_bytes:
                    raise ValueError(
                        f"{where}: a block takes {block_bytes} bytes; "
                        f"{self.card} has {self.shared_memory_bytes} bytes of shared memory"
                    )
        return self


@dataclass(frozen=True, config=_STRICT)
class UserTables:
    """The whole file."""

    version: Literal[1]
    sections: list[Section]

    @model_validator(mode="after")
    def _has_each_card_once(self) -> UserTables:
        cards = [section.measured_on for section in self.sections]
        for card in cards:
            if cards.count(card) > 1:
                raise ValueError(f"{card.name} with Triton {card.triton} has several sections")
        return self


def table_path() -> Path:
    """Return where the file stands, or would."""
    if given := os.environ.get(PATH_VARIABLE):
        return Path(given)
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "hexiseq_triton" / "launch_tables.yaml"


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a key that stands twice in one mapping is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value!r} stands twice; remove one", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_sections(path: Path) -> list[Section]:
    """Read a file of launch tables.

    Raises:
        ConfigError: naming the file, the field, its value, and what fits.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    try:
        return TypeAdapter(UserTables).validate_python(content).sections
    except ValidationError as error:
        raise ConfigError(
            "\n".join(f"{path}: {_fault(fault)}" for fault in error.errors(include_url=False))
        ) from error


def _fault(fault: Mapping[str, Any]) -> str:
    field = ".".join(map(str, fault["loc"])) or "the file"
    if fault["type"] == "unexpected_keyword_argument":
        return f"{field} is no field here; remove it or correct its name"
    value = "" if isinstance(fault["input"], dict | list) else f" is {fault['input']!r}"
    return f"{field}{value}: {fault['msg'].removeprefix('Value error, ')}"


def save_section(section: Section, path: Path) -> None:
    """Write a section into the file; what else stands there stays, unless it is measured anew.

    Raises:
        ConfigError: if the file exists and is no file of launch tables, or cannot be written.
    """
    sections = []
    for old in load_sections(path) if path.exists() else []:
        if old.measured_on == section.measured_on:
            section = old.updated(section)
        else:
            sections.append(old)
    content = {"version": 1, "sections": [_plain(each) for each in (*sections, section)]}
    new = path.with_suffix(".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(HEADER + yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        new.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def _plain(section: Section) -> dict[str, Any]:
    plain: dict[str, Any] = TypeAdapter(Section).dump_python(section, exclude_defaults=True)
    return plain


Choices = Mapping[tuple[str, int], Config]
"""What a user's file holds for one card, by table name and padded head dimension."""


@cache
def tuned(device: torch.device) -> Choices:
    """Return the user's choices for a CUDA device.

    Raises:
        ConfigError: if there is a file and it is wrong.
    """
    path = table_path()
    if not path.exists():
        if PATH_VARIABLE in os.environ:
            logger.warning(
                "%s names %s, which does not exist: built-in launch tables are used; "
                "`hexiseq tune` writes it",
                PATH_VARIABLE, path,
            )  # fmt: skip
        return {}
    return choices_for(Card.of(device), load_sections(path), path)


def choices_for(card: Card, sections: Sequence[Section], path: Path) -> Choices:
    """Return the choices that were measured on such a card; say if there are none."""
    for section in sections:
        if section.measured_on == card:
            return {
                (name, head_dim): entry.config
                for name, entries in section.tables.items()
                for head_dim, entry in entries.items()
            }
    logger.warning(
        "%s has nothing for %s (%s, %d bytes of shared memory) under Triton %s: "
        "built-in launch tables are used; `hexiseq tune` measures this card",
        path, *card,
    )  # fmt: skip
    return {}
