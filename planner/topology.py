"""From the text of `nvidia-smi topo -m` to a node of a cluster file.

The matrix names the path between any two GPUs and NICs of a host:

    NV#   # NVLink lanes, to a switch or straight to the other GPU
    PIX   at most one PCIe bridge          PXB   several bridges, not the host's
    PHB   the host's PCIe bridge           NODE  between bridges of one NUMA node
    SYS   between the sockets (once called SOC)

A planner's node has one rate for each GPU, so the worst path between two GPUs decides: lanes count
where every pair has them, PCIe elsewhere. The text holds no rates: those of PCIe come from the GPU
table, a NIC's from the user.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hexiseq_triton.errors import ConfigError
from hexiseq_triton.planner.gpus import GpuSpec, gpu_by_device_name, gpu_table, nearest

PATHS = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""PCIe paths, shortest first."""
_OLD_NAMES = {"SOC": "SYS"}
_LANES = re.compile(r"NV(\d+)$")
_NIC = re.compile(r"(NIC|mlx|bnxt|irdma|efa|hns|cxgb)\w*$")
_TERMINAL = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LISTED_GPU = re.compile(r"^\s*GPU (\d+): (.+?)(?: \(UUID: .*\))?\s*$", re.MULTILINE)

SYS_SHARE = 0.5
"""Share of PCIe's rate between two sockets, whose link all their GPUs share; assumed."""


@dataclass(frozen=True)
class Topology:
    """The matrix: names of GPUs and NICs, and the path between any two of them."""

    gpus: tuple[str, ...]
    nics: tuple[str, ...]
    paths: dict[tuple[str, str], str]

    @property
    def gpu_paths(self) -> list[str]:
        """The paths between different GPUs, each pair once."""
        return [self.paths[a, b] for i, a in enumerate(self.gpus) for b in self.gpus[:i]]

    @property
    def fewest_lanes(self) -> int:
        """NVLink lanes that every pair of GPUs has; 0 if some pair has none."""
        return min((_lanes(path) for path in self.gpu_paths), default=0)

    @property
    def worst_pcie_path(self) -> str | None:
        """The longest PCIe path between two GPUs; None if NVLink joins all pairs."""
        return max((p for p in self.gpu_paths if p in PATHS), key=PATHS.index, default=None)

    @property
    def nics_per_gpu(self) -> float:
        """How much of a NIC the worst served GPU has, if each uses the NICs nearest to it."""
        near = {gpu: self._nearest_nics(gpu) for gpu in self.gpus}
        users = Counter(nic for nics in near.values() for nic in nics)
        return min(sum(1 / users[nic] for nic in nics) for nics in near.values())

    def _nearest_nics(self, gpu: str) -> list[str]:
        distance = {nic: PATHS.index(self.paths[gpu, nic]) for nic in self.nics}
        return [nic for nic in self.nics if distance[nic] == min(distance.values())]


def read_topology(text: str, source: str) -> Topology:
    """Read what `nvidia-smi topo -m` prints.

    Args:
        text: all of it or at least the matrix, with tabs or spaces, with or without colours.
        source: names it in errors.

    Raises:
        ConfigError: if there is no matrix, a row is missing or too short, a path is unknown, or the
            two directions of a pair differ.
    """
    lines = [_TERMINAL.sub("", line).split() for line in text.splitlines()]
    start = next((i for i, words in enumerate(lines) if words[:1] == ["GPU0"]), None)
    if start is None:
        raise ConfigError(
            f"{source}: has no line that begins with GPU0; the text of `nvidia-smi topo -m` is "
            "needed"
        )
    names = _device_names(lines[start])
    rows = {words[0]: words[1:] for words in lines[start + 1 :] if words and words[0] in names}
    paths = {
        (a, b): path
        for a in names
        for b, path in zip(names, _row(rows, a, names, source), strict=True)
    }
    _check_symmetric(paths, source)
    gpus = tuple(name for name in names if name.startswith("GPU"))
    nics = tuple(name for name in names if not name.startswith("GPU"))
    return Topology(gpus, nics, paths)


def _device_names(header: Sequence[str]) -> list[str]:
    """Return the columns that are devices; after them come the affinities."""
    names = []
    for word in header:
        if not re.fullmatch(r"GPU\d+", word) and not _NIC.match(word):
            break
        names.append(word)
    return names


def _row(rows: dict[str, list[str]], name: str, names: Sequence[str], source: str) -> list[str]:
    """Return the paths of one device, checked."""
    cells = rows.get(name, [])[: len(names)]
    if len(cells) < len(names):
        raise ConfigError(
            f"{source}: row {name} has {len(cells)} paths to {len(names)} devices; copy the whole "
            "matrix"
        )
    cells = [_OLD_NAMES.get(cell, cell) for cell in cells]
    for other, cell in zip(names, cells, strict=True):
        between_gpus = name.startswith("GPU") and other.startswith("GPU")
        path = cell in PATHS or (between_gpus and _lanes(cell))
        if not (cell == "X" if other == name else path):
            raise ConfigError(
                f"{source}: {name} to {other} is {cell!r}; a path is one of {', '.join(PATHS)}, "
                "between GPUs also NV1, NV2, ..., and X to itself"
            )
    return cells


def _check_symmetric(paths: dict[tuple[str, str], str], source: str) -> None:
    for (a, b), path in paths.items():
        if paths[b, a] != path:
            raise ConfigError(
                f"{source}: {a} to {b} is {path}, and {b} to {a} is {paths[b, a]}; a path is the "
                "same in both directions"
            )


def _lanes(path: str) -> int:
    found = _LANES.match(path)
    return int(found[1]) if found else 0


def listed_gpus(text: str, source: str) -> list[str]:
    """Return the table's names of the GPUs that `nvidia-smi -L` lists, in its order.

    Raises:
        ConfigError: if it lists none, or one that the table doesn't know.
    """
    names = []
    for index, device_name in _LISTED_GPU.findall(text):
        name = gpu_by_device_name(device_name)
        if name is None:
            raise ConfigError(
                f"{source}: GPU {index} is {device_name!r}, which no GPU of the table is called; "
                "name the model with --gpu, and describe it with --gpus (docs/add-a-gpu.md)"
            )
        names.append(name)
    if not names:
        raise ConfigError(f"{source}: lists no GPU; the text of `nvidia-smi -L` is needed")
    return names


def node_entry(
    topology: Topology,
    gpus: Sequence[str],
    table: Mapping[str, GpuSpec] | None = None,
    nic_gb_per_s: float | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Return a node of a cluster file without its name, and what the numbers rest on.

    Args:
        topology: of one host.
        gpus: the model of each of its GPUs, by the names of `table`.
        table: GPUs by name; `gpu_table()` if left out.
        nic_gb_per_s: what one NIC sends, GB/s one way.

    Raises:
        ConfigError: if the number of models is not that of the GPUs, or a model is unknown.
    """
    table = gpu_table() if table is None else table
    if len(gpus) != len(topology.gpus):
        raise ConfigError(f"{len(gpus)} GPU models are given; the host has {len(topology.gpus)}")
    unknown = sorted(set(gpus) - table.keys())
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is no known GPU; near it: {nearest(unknown[0], table)}")
    alike = len(set(gpus)) == 1
    entry: dict[str, Any] = {"gpus": {gpus[0]: len(gpus)} if alike else list(gpus)}
    notes = []
    for rate, note in (_inside(topology, gpus, table), _outside(topology, nic_gb_per_s)):
        entry |= rate
        notes.append(note)
    return entry, notes


def _inside(
    topology: Topology, gpus: Sequence[str], table: Mapping[str, GpuSpec]
) -> tuple[dict[str, float], str]:
    """Return what a GPU reaches inside the node, if the GPU table doesn't say it already."""
    if len(gpus) == 1:
        return {}, "one GPU: nothing travels inside the node"
    linked = all(table[gpu].nvlink_gb_per_s for gpu in gpus)
    if topology.fewest_lanes and linked:
        lanes = topology.fewest_lanes
        return {}, f"NVLink joins every pair of GPUs by {lanes} lanes or more: the GPU table's rate"

    worst = topology.worst_pcie_path
    unused = sum(bool(_lanes(path)) for path in topology.gpu_paths)
    also = f"; NVLink of {unused} of {len(topology.gpu_paths)} pairs is not counted" * bool(unused)
    rates = [figure.value for gpu in gpus if (figure := table[gpu].pcie_gb_per_s)]
    if len(rates) < len(gpus):
        return {}, f"the GPU table has no PCIe rate for every GPU here: give intra_gb_per_s{also}"
    share = SYS_SHARE if worst == "SYS" else 1.0
    note = f"PCIe, worst path {worst or 'not shown'}"
    if share < 1:
        note += f", {share:.0%} of its rate assumed"
    return {"intra_gb_per_s": min(rates) * share}, note + also


def _outside(topology: Topology, nic_gb_per_s: float | None) -> tuple[dict[str, float], str]:
    """Return what a GPU sends to other nodes, through the NICs nearest to it."""
    if not topology.nics:
        return {}, "no NIC is shown: give inter_gb_per_s where the cluster has several nodes"
    each = topology.nics_per_gpu
    note = f"NICs: {len(topology.nics)}; the worst served GPU has {each:.3g} of one nearest to it"
    if nic_gb_per_s is None:
        return {}, f"{note}: give inter_gb_per_s, or a NIC's rate with --nic-gb-per-s"
    return {"inter_gb_per_s": each * nic_gb_per_s}, f"{note}, at {nic_gb_per_s:g} GB/s a NIC"
