"""Clusters: which GPUs stand in which node, and how fast they reach each other.

A cluster file, in YAML:

    inter_gb_per_s: 25            # what one GPU sends to other nodes, GB/s one way
    nodes:
      - {name: h, count: 2, gpus: {H100-SXM: 8}}
      - {name: mine, gpus: [my-card, my-card, L40S], inter_gb_per_s: 12.5}
    gpus:                         # cards that are not in the table; three numbers suffice
      my-card: {dense_tflops: 200, memory_gb: 24, network_gb_per_s: 12.5}
    prices: {H100-SXM: 2.5}       # what an hour of a GPU costs, for `hexiseq whatif`

Ranks count up node by node; in a node as listed, a mapping of counts by GPU name. Cards that many
cluster files name stand better in a GPU file of their own (`gpus.gpu_overlay`).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, field
from dataclasses import dataclass as plain_dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass

from hexiseq_triton.errors import ConfigError
from hexiseq_triton.planner.files import FILE_CONFIG, Count, Positive, build, read_mapping
from hexiseq_triton.planner.gpus import GpuSpec, gpu_overlay, gpu_table, nearest
from hexiseq_triton.planner.overlap import Overlap

MOST_GPUS = 16_384


def _gpu_names(content: Any) -> Any:
    """Return GPU names in rank order from a list of names or a mapping of name to count."""
    if isinstance(content, str | int | float) or content is None:
        raise ValueError("a list of GPU names is needed, or a mapping of counts by GPU name")
    if not isinstance(content, Mapping):
        return content
    for name, count in content.items():
        if type(count) is not int or not 0 < count <= MOST_GPUS:
            raise ValueError(f"{name} has count {count!r}; a count is 1 to {MOST_GPUS}")
    return [name for name in sorted(content, key=str) for _ in range(content[name])]


GpuNames = Annotated[
    tuple[str, ...],
    BeforeValidator(_gpu_names, json_schema_input_type=tuple[str, ...] | dict[str, Count]),
]


def _one_line(name: str) -> str:
    if not name.strip() or not name.isprintable():
        raise ValueError("a node's name is text in one line; give it one")
    return name


@dataclass(frozen=True, config=FILE_CONFIG)
class NodeEntry:
    """One node of a cluster file, or `count` nodes of the same make.

    Bandwidths are GB/s one way for one GPU. Left out, `intra_gb_per_s` is each GPU's own link
    (NVLink, else PCIe, else its network) and `inter_gb_per_s` the cluster's.
    """

    name: Annotated[str, AfterValidator(_one_line)]
    gpus: GpuNames
    count: Count = 1
    intra_gb_per_s: Positive | None = None
    intra_latency_us: Positive = 5.0
    inter_gb_per_s: Positive | None = None
    inter_latency_us: Positive | None = None

    @property
    def names(self) -> list[str]:
        return [self.name] if self.count == 1 else [f"{self.name}-{i}" for i in range(self.count)]


@dataclass(frozen=True, config=FILE_CONFIG)
class ClusterFile:
    """The content of a cluster file; `prices` are those of one GPU for an hour."""

    nodes: tuple[NodeEntry, ...]
    inter_gb_per_s: Positive | None = None
    inter_latency_us: Positive = 10.0
    overlap: Overlap | None = None
    gpus: dict[str, GpuSpec] = Field(default_factory=dict)
    prices: dict[str, Positive] = Field(default_factory=dict)


@plain_dataclass(frozen=True)
class Device:
    """One GPU: its rank, model, node, and how fast it sends or receives."""

    rank: int
    gpu: str
    node: str
    in_node_gb_per_s: float
    across_gb_per_s: float
    in_node_latency_us: float
    across_latency_us: float


@plain_dataclass(frozen=True)
class Cluster:
    """All GPUs, by rank, and the facts about their models; `overlap` only if it was measured.

    `prices` of a GPU's hour are the user's; plans don't depend on them.
    """

    devices: tuple[Device, ...]
    gpus: dict[str, GpuSpec]
    overlap: Overlap | None = None
    prices: dict[str, float] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path, gpus: str | Path | None = None) -> Cluster:
        """Read a cluster file.

        Args:
            path: the cluster file.
            gpus: a file of GPUs to lay over the table, for instance of cards that are not in it.

        Raises:
            ConfigError: naming the file, the field, its value, and what fits.
        """
        overlay = {} if gpus is None else gpu_overlay(gpus)
        return cls.from_mapping(read_mapping(path), str(path), overlay)

    @classmethod
    def from_mapping(
        cls,
        content: Mapping[str, Any],
        source: str = "cluster",
        overlay: Mapping[str, GpuSpec] | None = None,
    ) -> Cluster:
        """Check the content of a cluster file.

        Args:
            content: what the file holds.
            source: names it in errors.
            overlay: GPUs that go before those of the table.

        Raises:
            ConfigError: naming the field, its value, and what fits.
        """
        file = build(ClusterFile, content, source)
        _check_size_and_names(file, source)
        overlay = dict(overlay or {})
        both = sorted(file.gpus.keys() & overlay.keys())
        if both:
            raise ConfigError(
                f"{source}: gpus describes {', '.join(both)}, and so does the GPU file; remove one"
            )
        known = gpu_table() | overlay | file.gpus
        for name in file.prices:
            if name not in known:
                raise ConfigError(
                    f"{source}: prices names {name!r}, which is no known GPU; near it: "
                    f"{nearest(name, known)}"
                )
        devices: list[Device] = []
        for index, entry in enumerate(file.nodes):
            for name in entry.gpus:
                if name not in known:
                    raise ConfigError(
                        f"{source}: nodes.{index}.gpus names {name!r}, which is no known GPU; near "
                        f"it: {nearest(name, known)}; or describe it under gpus"
                    )
            for node in entry.names:
                for gpu in entry.gpus:
                    where = f"{source}: nodes.{index}"
                    devices.append(_device(len(devices), node, gpu, known[gpu], entry, file, where))
        used = {device.gpu for device in devices}
        models = {name: known[name] for name in sorted(used)}
        return cls(tuple(devices), models, file.overlap, dict(file.prices))

    @property
    def world_size(self) -> int:
        return len(self.devices)

    def gpu(self, rank: int) -> GpuSpec:
        """Return the facts about a rank's GPU model."""
        return self.gpus[self.devices[rank].gpu]

    @cached_property
    def ranks_by_node(self) -> dict[str, tuple[int, ...]]:
        """The ranks of every node, in order."""
        nodes: dict[str, list[int]] = {}
        for device in self.devices:
            nodes.setdefault(device.node, []).append(device.rank)
        return {node: tuple(ranks) for node, ranks in nodes.items()}

    def assumed(self, gpu: str) -> dict[str, float]:
        """Return the figures of a GPU model that nobody measured and no vendor gave."""
        spec = self.gpus[gpu]
        figures = spec.assumed
        network = spec.network_gb_per_s
        own_link = spec.nvlink_gb_per_s or spec.pcie_gb_per_s
        if network is not None and own_link is None:
            rates = {device.in_node_gb_per_s for device in self.devices if device.gpu == gpu}
            if network.value in rates:
                figures["intra_gb_per_s"] = network.value  # what it reaches towards other nodes
        return figures

    @cached_property
    def digest(self) -> str:
        """A hash of everything the planner can see of the cluster."""
        gpus = {name: asdict(gpu) for name, gpu in self.gpus.items()}
        content: list[Any] = [gpus, [list(vars(device).values()) for device in self.devices]]
        if self.overlap is not None:
            content.append(asdict(self.overlap))
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _check_size_and_names(file: ClusterFile, source: str) -> None:
    empty = [f"nodes.{i}.gpus" for i, entry in enumerate(file.nodes) if not entry.gpus]
    if empty or not file.nodes:
        field = empty[0] if empty else "nodes"
        raise ConfigError(f"{source}: {field} is empty; a cluster has nodes, a node has GPUs")
    total = sum(entry.count * len(entry.gpus) for entry in file.nodes)
    if total > MOST_GPUS:
        raise ConfigError(f"{source}: nodes hold {total} GPUs; at most {MOST_GPUS} can be planned")
    names = Counter(name for entry in file.nodes for name in entry.names)
    twice = sorted(name for name, times in names.items() if times > 1)
    if twice:
        raise ConfigError(f"{source}: nodes.name {', '.join(twice)} stands twice; rename one")


def _device(
    rank: int,
    node: str,
    name: str,
    gpu: GpuSpec,
    entry: NodeEntry,
    file: ClusterFile,
    where: str,
) -> Device:
    """Return one rank; the node's figures go before the cluster's, those before the GPU's."""
    in_node = entry.intra_gb_per_s or gpu.in_node_gb_per_s
    if in_node is None:
        raise ConfigError(f"{where}.intra_gb_per_s is missing, and {name} has no link of its own")
    across = entry.inter_gb_per_s or file.inter_gb_per_s
    if across is None and gpu.network_gb_per_s is not None:
        across = gpu.network_gb_per_s.value
    if across is None and len(file.nodes) == entry.count == 1:
        across = in_node  # never used
    if across is None:
        raise ConfigError(
            f"{where}.inter_gb_per_s is missing: node {node} is not connected to the other nodes; "
            "give what one of its GPUs sends to them, in GB/s one way"
        )
    latency_us = entry.inter_latency_us or file.inter_latency_us
    return Device(rank, name, node, in_node, across, entry.intra_latency_us, latency_us)
