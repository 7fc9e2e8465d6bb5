"""GPUs as data: peaks, memory and links, each number with its origin and source.

The table is `gpus.yaml` beside this file. A cluster file can describe further GPUs by three
numbers; everything else then has a default, marked `assumed`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from hexiseq_triton.planner.files import FILE_CONFIG, build, read_mapping

TABLE = Path(__file__).with_name("gpus.yaml")
Work = Literal["gemm", "attention_forward", "attention_backward", "memory"]


@dataclass(frozen=True, config=FILE_CONFIG)
class Figure:
    """One number about a GPU, and how far it can be trusted."""

    value: Annotated[float, Field(gt=0)]
    origin: Literal["measured", "spec", "assumed"] = "spec"
    source: str = "cluster file"


def _figure(content: Any) -> Any:
    return {"value": content} if isinstance(content, int | float | str) else content


FileFigure = Annotated[Figure, BeforeValidator(_figure)]
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


@dataclass(frozen=True, config=FILE_CONFIG)
class GpuSpec:
    """A GPU model. Peaks are dense bf16; bandwidths are GB/s one way; a GB is 10^9 bytes.

    `network_gb_per_s` is what the GPU reaches towards other GPUs where neither the node nor a
    more special link says otherwise.
    """

    dense_tflops: FileFigure
    memory_gb: FileFigure
    network_gb_per_s: FileFigure | None = None
    memory_gb_per_s: FileFigure = _assumed(1000)
    nvlink_gb_per_s: FileFigure | None = None
    pcie_gb_per_s: FileFigure | None = None
    efficiency: Efficiency = Field(default_factory=Efficiency)
    device_names: tuple[str, ...] = ()
    dense: Literal[True] = True
    runnable: bool = True
    reason: str | None = None

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


@cache
def gpu_table() -> dict[str, GpuSpec]:
    """Return the GPUs of `gpus.yaml` by name."""
    content = read_mapping(TABLE)
    sources = content["sources"]
    for card in content["gpus"].values():
        for figure in _figures(card):
            figure["source"] = sources[figure["source"]]
    return build(dict[str, GpuSpec], content["gpus"], TABLE.name)


def _figures(content: Any) -> Iterable[dict[str, Any]]:
    """Yield every mapping with a `source` in nested mappings."""
    if isinstance(content, dict):
        if "source" in content:
            yield content
        for value in content.values():
            yield from _figures(value)


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
    alike = get_close_matches(name.lower(), by_lower, n=3, cutoff=0.4)
    return ", ".join(by_lower[lower] for lower in alike or sorted(by_lower))
