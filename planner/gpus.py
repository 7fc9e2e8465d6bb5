"""GPUs as data: peaks, memory and links, each number with its origin and source.

The table is `gpus.yaml` beside this file. A file of the same form, or the `gpus` of a cluster file,
can describe further GPUs by three numbers; everything else then has a default, marked `assumed`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from hexiseq_triton.planner.files import (
    FILE_CONFIG,
    Count,
    Positive,
    build,
    in_a_line,
    read_mapping,
)

TABLE = Path(__file__).with_name("gpus.yaml")
Work = Literal["gemm", "attention_forward", "attention_backward", "memory"]


@dataclass(frozen=True, config=FILE_CONFIG)
class Figure:
    """One number about a GPU, and how far it can be trusted."""

    value: Positive
    origin: Literal["measured", "spec", "assumed"] = "spec"
    source: str = "the user's file"


def _figure(content: Any) -> Any:
    return {"value": content} if isinstance(content, int | float | str) else content


FileFigure = Annotated[Figure, BeforeValidator(_figure, json_schema_input_type=Positive | Figure)]
"""A Figure; a file may give the plain number."""


def _assumed(value: float) -> Any:
    return Field(default=Figure(value, "assumed", "default of hexiseq_triton"))


@dataclass(frozen=True, config=FILE_CONFIG)
class Efficiency:
    """Share of the peak that real kernels reach; `memory` is the share of the bandwidth."""

    gemm: FileFigure = _assumed(0.7)
    attention_forward: FileFigure = _assumed(0.5)
    attention_backward: FileFigure = _assumed(0.4)
    memory: FileFigure = _assumed(0.8)

    def __post_init__(self) -> None:
        for field in fields(self):
            share = getattr(self, field.name).value
            if share > 1:  # percents, which would make a GPU a hundred times as fast
                raise ValueError(f"{field.name} is {share:g}; it is a share of the peak, up to 1")


def _measured(content: Any) -> Any:
    plain = isinstance(content, int | float | str)
    return {"value": content, "origin": "measured"} if plain else content


@dataclass(frozen=True, config=FILE_CONFIG)
class MeasuredRate:
    """TFLOP/s reached in one kind of work, for one head dim and from a number of tokens on.

    `tokens` are a rank's rows for `gemm_*`, and the longest document's for `attention_*`. A rate
    without `head_dim` counts for all of them.
    """

    work: Literal["gemm_forward", "gemm_backward", "attention_forward", "attention_backward"]
    tflops: Annotated[Figure, BeforeValidator(_measured, json_schema_input_type=Positive | Figure)]
    head_dim: Count | None = None
    tokens: Annotated[int, Field(ge=0)] = 0


@in_a_line
@dataclass(frozen=True, config=FILE_CONFIG)
class GpuSpec:
    """A GPU model. Peaks are dense bf16; bandwidths are GB/s one way; a GB is 10^9 bytes.

    `network_gb_per_s` is what the GPU reaches towards other GPUs where neither the node nor a
    more special link says otherwise. Measured `rates` go before peak x efficiency.
    """

    dense_tflops: FileFigure
    memory_gb: FileFigure
    network_gb_per_s: FileFigure | None = None
    memory_gb_per_s: FileFigure = _assumed(1000)
    nvlink_gb_per_s: FileFigure | None = None
    pcie_gb_per_s: FileFigure | None = None
    efficiency: Efficiency = Field(default_factory=Efficiency)
    rates: tuple[MeasuredRate, ...] = ()
    device_names: tuple[str, ...] = ()
    dense: Literal[True] = True
    runnable: bool = True
    reason: str | None = None

    def __post_init__(self) -> None:
        if self.runnable != (self.reason is None):
            raise ValueError("runnable: false needs a reason, and runnable: true has none")

    def rate(self, work: Work) -> Figure:
        """Return what the GPU reaches: FLOP/s, or bytes/s for `memory`; peak x efficiency."""
        share = getattr(self.efficiency, work)
        peak = self.memory_gb_per_s if work == "memory" else self.dense_tflops
        unit = 1e9 if work == "memory" else 1e12
        origin = share.origin if peak.origin != "assumed" else peak.origin
        return Figure(peak.value * unit * share.value, origin, f"{peak.source}; {share.source}")

    @property
    def in_node_gb_per_s(self) -> float | None:
        """What it reaches towards GPUs of its node: NVLink, else PCIe, else its network."""
        for link in (self.nvlink_gb_per_s, self.pcie_gb_per_s, self.network_gb_per_s):
            if link is not None:
                return link.value
        return None

    def figures(self) -> Iterator[tuple[str, Figure]]:
        """Yield every number with its name in the file; `rates` are left out."""
        for part, prefix in ((self, ""), (self.efficiency, "efficiency.")):
            for field in fields(part):
                figure = getattr(part, field.name)
                if isinstance(figure, Figure):
                    yield prefix + field.name, figure

    @property
    def assumed(self) -> dict[str, float]:
        """Figures that nobody measured and no vendor gave, unless `rates` replace them."""
        measured = {rate.work for rate in self.rates}
        gemm = "gemm" if measured >= {"gemm_forward", "gemm_backward"} else ""
        unused = {f"efficiency.{work}" for work in (*measured, gemm)}
        return {
            name: figure.value
            for name, figure in self.figures()
            if figure.origin == "assumed" and name not in unused
        }


@dataclass(frozen=True, config=FILE_CONFIG)
class GpuFile:
    """The content of a GPU file. A figure's `source` may be a key of `sources`."""

    gpus: dict[str, GpuSpec]
    sources: dict[str, str] = Field(default_factory=dict)


@cache
def gpu_table() -> dict[str, GpuSpec]:
    """Return the GPUs of `gpus.yaml` by name."""
    return _cards(read_mapping(TABLE), TABLE.name)


def gpu_overlay(path: str | Path) -> dict[str, GpuSpec]:
    """Return the GPUs of a file that is laid over the table; it has the form of `gpus.yaml`.

    What the file says of a GPU of the table replaces those fields and keeps the others; of
    `efficiency`, those works.

    Raises:
        ConfigError: naming the file, the field, its value, and what fits.
    """
    content, table = read_mapping(path), read_mapping(TABLE)
    cards, sources = content.get("gpus"), content.get("sources", {})
    if isinstance(cards, dict) and isinstance(sources, dict):
        content["gpus"] = {name: _merged(table["gpus"].get(name), cards[name]) for name in cards}
        content["sources"] = table["sources"] | sources
    return _cards(content, str(path))


def _cards(content: Mapping[str, Any], source: str) -> dict[str, GpuSpec]:
    """Return the GPUs of a file's content, with the sources' names written out."""
    sources = content.get("sources")
    if isinstance(sources, dict):
        for figure in _with_source(content.get("gpus")):
            figure["source"] = sources.get(figure["source"], figure["source"])
    return build(GpuFile, content, source).gpus


def _merged(known: Any, given: Any) -> Any:
    """Return the fields of a known GPU with those given laid over them."""
    if not isinstance(known, dict) or not isinstance(given, dict):
        return given
    merged = known | given
    shares = known.get("efficiency"), given.get("efficiency")
    if isinstance(shares[0], dict) and isinstance(shares[1], dict):
        merged["efficiency"] = shares[0] | shares[1]
    return merged


def _with_source(content: Any) -> Iterator[dict[str, Any]]:
    """Yield every mapping with a `source` in nested mappings."""
    if isinstance(content, dict):
        if isinstance(content.get("source"), str):
            yield content
        for value in content.values():
            yield from _with_source(value)


def gpu_by_device_name(device_name: str) -> str | None:
    """Return the table's name for what CUDA calls the card; None for a card not in the table."""
    for name, gpu in gpu_table().items():
        if is_named(device_name, gpu.device_names):
            return name
    return None


def is_named(device_name: str, names: Iterable[str]) -> bool:
    """Return whether CUDA's name for a card ends in one of `names`, as whole words.

    A part of it is not enough: "NVIDIA A10" would be found in "NVIDIA A100-SXM4-80GB".
    """
    return any(re.search(rf"\b{re.escape(name)}$", device_name) for name in names)


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the names most like `name`, for an error message; all of them if none is alike."""
    by_lower = {known.lower(): known for known in names}
    begin = [lower for lower in by_lower if lower.startswith(name.lower())]
    alike = begin or get_close_matches(name.lower(), by_lower, n=3, cutoff=0.4)
    return ", ".join(by_lower[lower] for lower in alike or sorted(by_lower))
