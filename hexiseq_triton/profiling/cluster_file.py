"""Write what was measured as a cluster file for `hexiseq plan --cluster`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from typing import Any

import yaml

from hexiseq_triton.planner.gpus import Figure, GpuSpec, gpu_by_device_name, gpu_table
from hexiseq_triton.planner.rates import ACROSS_SHARE, IN_NODE_SHARE
from hexiseq_triton.profiling.classes import GpuClass
from hexiseq_triton.profiling.profile import ClusterProfile

DIGITS = 4


def cluster_yaml(profile: ClusterProfile) -> str:
    """Return the text of the cluster file; comments say what else was found."""
    lines = "".join(f"# {line}\n" for line in heading(profile))
    text = yaml.dump(cluster_content(profile), Dumper=_Dumper, sort_keys=False, width=110)
    return lines + text


class _Dumper(yaml.SafeDumper):
    """Writes a mapping of plain values, and a list of them, on one line."""

    def represent_mapping(self, *args: Any, **kwargs: Any) -> yaml.MappingNode:
        node = super().represent_mapping(*args, **kwargs)
        node.flow_style = all(isinstance(value, yaml.ScalarNode) for _, value in node.value) or any(
            key.value == "tflops" for key, _ in node.value
        )
        return node


def heading(profile: ClusterProfile) -> Iterator[str]:
    """Yield what a reader of the file should know."""
    yield (
        f"measured by hexiseq profile in {profile.seconds:.0f} s: token-wise work of a layer of "
        f"{profile.model}, attention, links, in this package's own code"
    )
    if any(each.emulated for each in profile.classes):
        yield "some GPUs are emulated: their figures describe no real card"
    yield from profile.lines
    yield (
        "intra_gb_per_s and inter_gb_per_s are what transfers reached, divided by "
        f"{IN_NODE_SHARE:g} and {ACROSS_SHARE:g}, the shares of a rate that the planner counts on"
    )
    yield from measured_lines(profile)


def measured_lines(profile: ClusterProfile) -> Iterator[str]:
    """Yield how transfers do among many, and beside computing."""
    if profile.all_to_all is not None:
        ragged = profile.all_to_all
        yield (
            f"ragged all-to-all: {ragged.seconds * 1e3:.3g} ms, {ragged.ratio:.2f} times what the "
            "fullest port's link says"
        )
    if profile.overlap is not None:
        yield (
            "beside each other, for each second of both: computing takes "
            f"{profile.overlap.compute_slowdown:.2f} s longer, transfers "
            f"{profile.overlap.transfer_slowdown:.2f} s; attention that exchanges keys "
            f"takes {profile.overlap.attention_slowdown:.1%} longer"
        )


def cluster_content(profile: ClusterProfile) -> dict[str, Any]:
    """Return the content of the cluster file."""
    name_of = {rank: each.name for each in profile.classes for rank in each.ranks}
    content: dict[str, Any] = {}
    across = [link for r in name_of if (link := profile.link(r, in_node=False)) is not None]
    if across:
        slowest = min(link.bytes_per_s for link in across)
        content["inter_gb_per_s"] = _rounded(slowest / 1e9 / ACROSS_SHARE)
        content["inter_latency_us"] = _rounded(max(x.latency_seconds for x in across) * 1e6)
    if profile.overlap is not None:
        content["overlap"] = {
            name: _rounded(slowdown) for name, slowdown in asdict(profile.overlap).items()
        }
    content["nodes"] = []
    for host, group in groupby(enumerate(profile.hosts), key=lambda entry: entry[1]):
        ranks = [rank for rank, _ in group]
        content["nodes"].append(_node(profile, host, ranks, name_of))
    content["gpus"] = {each.name: _gpu(each) for each in profile.classes}
    return content


def _node(
    profile: ClusterProfile, host: str, ranks: list[int], name_of: dict[int, str]
) -> dict[str, Any]:
    node: dict[str, Any] = {"name": host, "gpus": [name_of[rank] for rank in ranks]}
    inside = [link for r in ranks if (link := profile.link(r, in_node=True)) is not None]
    if inside:
        slowest = min(link.bytes_per_s for link in inside)
        node["intra_gb_per_s"] = _rounded(slowest / 1e9 / IN_NODE_SHARE)
        node["intra_latency_us"] = _rounded(max(link.latency_seconds for link in inside) * 1e6)
    else:  # never used, but a GPU needs a link of some kind
        alone = next(each for each in profile.classes if ranks[0] in each.ranks)
        node["intra_gb_per_s"] = _rounded(alone.copy_bytes_per_s / 1e9)
    return node


def _gpu(found: GpuClass) -> dict[str, Any]:
    """Return a GPU's entry: measured figures, and the table's where nothing measures them."""
    source = "hexiseq profile" + (f", {found.emulated}" if found.emulated else "")
    measured = {"origin": "measured", "source": source}
    known = _known(found.device)
    best = max(rate.flops_per_s for rate in found.rates) / 1e12
    peak = {"value": _rounded(best), **measured}
    links: dict[str, Any] = {}
    if known is not None:
        peak = _plain(known.dense_tflops)
        named = {"nvlink_gb_per_s": known.nvlink_gb_per_s, "pcie_gb_per_s": known.pcie_gb_per_s}
        links = {name: _plain(figure) for name, figure in named.items() if figure is not None}
    return {
        "dense_tflops": peak,
        "memory_gb": {"value": _rounded(found.memory_bytes / 1e9), **measured},
        "memory_gb_per_s": {"value": _rounded(found.copy_bytes_per_s / 1e9), **measured},
        **links,
        "efficiency": {"memory": {"value": 1.0, **measured}},
        "rates": [
            {
                "work": rate.work,
                "tokens": rate.tokens,
                **({} if rate.head_dim is None else {"head_dim": rate.head_dim}),
                "tflops": {"value": _rounded(rate.flops_per_s / 1e12), **measured},
            }
            for rate in found.rates
        ],
        "device_names": [] if found.device == "cpu" else [found.device],
    }


def _known(device: str) -> GpuSpec | None:
    name = gpu_by_device_name(device)
    return None if name is None else gpu_table()[name]


def _plain(figure: Figure) -> dict[str, Any]:
    return asdict(figure)


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
