"""A cluster as it is, and as it might be: nodes that come, nodes that go, another network.

    8xH100          a node of eight H100 more; 2x8xH100 is two such nodes
    node3           without this node; nodes that a file describes together go by their common name
    x2, 50          twice what a GPU sends to other nodes, or 50 GB/s one way

A `+` joins what belongs together: 8xH100+8xL40S, node3+node4. A GPU goes by its name in the table,
or by how that begins: H100 is the cluster's only GPU whose name begins with H100-, or the only one
of the table.

What is given of each kind are alternatives, and every combination is a variant, but for those that
leave no GPU, or change a network that joins nothing.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hexiseq_triton.errors import ConfigError
from hexiseq_triton.planner.clusters import MOST_GPUS, Cluster, ClusterFile
from hexiseq_triton.planner.files import build, read_mapping
from hexiseq_triton.planner.gpus import GpuSpec, gpu_overlay, gpu_table, nearest

AS_IT_IS = "as it is"
MOST = 64
"""Variants in one call."""
Entry = dict[str, Any]
_USELESS = {
    "--drop": "no node of {} would be left; name fewer, or say what to --add",
    "--bandwidth": "{} has one node, so nothing passes between nodes; --add another",
}


@dataclass(frozen=True)
class Variant:
    """A cluster, and what was changed to come to it."""

    name: str
    cluster: Cluster

    @property
    def gpus(self) -> dict[str, int]:
        """How many GPUs of each model there are."""
        return dict(Counter(device.gpu for device in self.cluster.devices))


def variants_of(
    path: str | Path,
    *,
    add: Sequence[str] = (),
    drop: Sequence[str] = (),
    bandwidth: Sequence[str] = (),
    gpus: str | Path | None = None,
) -> list[Variant]:
    """Return the cluster of a file as it is, and then every combination of changes to it.

    Args:
        path: the cluster file.
        add: nodes that might come.
        drop: nodes that might go.
        bandwidth: what the network might be.
        gpus: a file of GPUs to lay over the table.

    Raises:
        ConfigError: if a file is wrong, a change cannot be read, stands twice, names no node or GPU
            there is, or leaves nothing; or if there are more than `MOST` combinations.
    """
    changes = _Changes(path, gpus)
    count = num_combinations(add, drop, bandwidth)
    if count > MOST:
        raise ConfigError(
            f"{len(add)} additions, {len(drop)} drops and {len(bandwidth)} bandwidths have {count} "
            f"combinations; at most {MOST} are judged in one call"
        )
    for option, given in (("--add", add), ("--drop", drop), ("--bandwidth", bandwidth)):
        for change, times in Counter(given).items():
            if times > 1:
                raise ConfigError(f"{option} {change} stands twice; give it once")
    combinations = list(itertools.product((None, *add), (None, *drop), (None, *bandwidth)))
    found = [changes.variant(*combination) for combination in combinations]
    for option, given, at in (("--drop", drop, 1), ("--bandwidth", bandwidth, 2)):
        for change in given:
            used = (v for v, c in zip(found, combinations, strict=True) if c[at] == change)
            if not any(used):
                raise ConfigError(f"{option} {change}: {_USELESS[option]}".format(path))
    return [variant for variant in found if variant is not None]


def num_combinations(*alternatives: Sequence[str]) -> int:
    """Return how many ways there are to take one of each kind of change, or none."""
    return math.prod(len(given) + 1 for given in alternatives)


class _Changes:
    """Applies changes to the nodes of a cluster file, one entry a node."""

    def __init__(self, path: str | Path, gpus: str | Path | None) -> None:
        self.path = path
        self._overlay = {} if gpus is None else gpu_overlay(gpus)
        self._content = read_mapping(path)
        self._base = Cluster.from_mapping(self._content, str(path), self._overlay)
        file = build(ClusterFile, self._content, str(path))
        self.entries: list[Entry] = []
        self._together: dict[str, list[str]] = {}
        for entry, raw in zip(file.nodes, self._content["nodes"], strict=True):
            self.entries += [raw | {"name": name, "count": 1} for name in entry.names]
            self._together[entry.name] = entry.names

    def variant(self, add: str | None, drop: str | None, bandwidth: str | None) -> Variant | None:
        """Return one combination; None if it is no variant."""
        kept = self.entries if drop is None else self._without(drop)
        nodes = kept if add is None else [*kept, *self._new_nodes(add)]
        if not nodes:
            return None
        content = self._content | {"nodes": nodes}
        cluster = Cluster.from_mapping(content, str(self.path), self._overlay)
        if bandwidth is not None:
            if len(cluster.ranks_by_node) == 1:
                return None
            cluster = _connected(cluster, bandwidth)
        parts = {"+ ": add, "without ": drop, "bandwidth ": bandwidth}
        name = ", ".join(f"{word}{change}" for word, change in parts.items() if change is not None)
        return Variant(name or AS_IT_IS, cluster)

    def _without(self, drop: str) -> list[Entry]:
        gone: set[str] = set()
        names = [str(entry["name"]) for entry in self.entries]
        for name in _parts(drop):
            if name not in names and name not in self._together:
                raise ConfigError(
                    f"--drop {drop}: {self.path} has no node {name!r}; near it: "
                    f"{nearest(name, names)}"
                )
            gone |= set(self._together.get(name, [name]))
        return [entry for entry in self.entries if entry["name"] not in gone]

    def _new_nodes(self, add: str) -> list[Entry]:
        entries: list[Entry] = []
        taken = {entry["name"] for entry in self.entries}
        shared = {} if "inter_gb_per_s" in self._content else self._slowest_network()
        known = gpu_table() | self._overlay | self._base.gpus
        for part in _parts(add):
            found = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)x(\S+)", part)
            if found is None:
                raise ConfigError(
                    f"--add {add}: {part!r} is no node; write 8xH100, or 2x8xH100 for two"
                )
            count, size = int(found[1] or 1), int(found[2])
            if count * size > MOST_GPUS:  # before a list of them is made
                raise ConfigError(
                    f"--add {add}: {part!r} is {count * size} GPUs; at most {MOST_GPUS} can be "
                    "planned"
                )
            gpu = gpu_named(found[3], self._base.gpus, known, f"--add {add}")
            node = next(
                name for name in map("new{}".format, itertools.count()) if name not in taken
            )
            taken.add(node)
            entries.append({"name": node, "count": count, "gpus": [gpu] * size} | shared)
        return entries

    def _slowest_network(self) -> Entry:
        """Return what the slowest node sends to others, if every node says."""
        rates = [
            float(entry["inter_gb_per_s"]) for entry in self.entries if "inter_gb_per_s" in entry
        ]
        return {"inter_gb_per_s": min(rates)} if len(rates) == len(self.entries) else {}


def gpu_named(name: str, near: Iterable[str], known: Mapping[str, GpuSpec], where: str) -> str:
    """Return the GPU that is meant by its name or the beginning of it.

    Args:
        name: as the user gave it.
        near: GPUs that go before others whose names begin alike.
        known: all that there are.
        where: names the option in errors.

    Raises:
        ConfigError: if there is none, or if several begin so.
    """
    if name in known:
        return name
    for names in (near, known):
        alike = [each for each in names if each.startswith(f"{name}-")]
        if len(alike) == 1:
            return alike[0]
        if alike:
            raise ConfigError(f"{where}: {name} may be {' or '.join(alike)}; give the whole name")
    raise ConfigError(f"{where}: {name!r} is no known GPU; near it: {nearest(name, known)}")


def _connected(cluster: Cluster, bandwidth: str) -> Cluster:
    """Return the cluster with another network between nodes."""
    times = bandwidth.removeprefix("x")
    try:
        value = float(times)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(
            f"--bandwidth is {bandwidth!r}; write x2 for twice as much, or 50 for 50 GB/s one way"
        )
    devices = tuple(
        replace(
            device,
            across_gb_per_s=value * (device.across_gb_per_s if times != bandwidth else 1.0),
        )
        for device in cluster.devices
    )
    return replace(cluster, devices=devices)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split("+")]
