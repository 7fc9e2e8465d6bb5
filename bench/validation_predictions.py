"""What the simulator says of recorded lines, from the cluster file of their session."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from validation_cases import Line, model_of, plan_of

from hexiseq_triton.planner import Cluster, Workload
from hexiseq_triton.planner.cost import Cost
from hexiseq_triton.planner.explain import cost_of
from hexiseq_triton.planner.memory import peak_bytes
from hexiseq_triton.planner.overlap import Overlap
from hexiseq_triton.planner.rates import ACROSS_SHARE, IN_NODE_SHARE, Floats, computing_rate
from hexiseq_triton.planner.simulator import layer_seconds, simulate

FREE_GB_PER_S, NO_LATENCY_US = 1e9, 1e-9
"""Links that take no time."""


def predicted_ms(line: Line, folder: Path) -> float:
    """Return what is predicted for a line, in milliseconds; `folder` has its cluster file."""
    cluster = cluster_of(line, folder)
    if line["level"] == "kernel":
        gpu = cluster.gpus[line["gpu"]] if "gpu" in line else cluster.gpu(line["rank"])
        shape, works = (line["head_dim"], line["tokens"]), line["flops"].items()
        return 1e3 * sum(flops / computing_rate(gpu, work, *shape).value for work, flops in works)
    if line["level"] == "link":
        return 1e3 * _link_seconds(line, cluster)
    return _simulated_ms(line, cluster)


def predicted_peak_bytes(line: Line, folder: Path) -> Floats:
    """Return what is predicted of each rank's peak memory."""
    cost = cost_of_line(line, cluster_of(line, folder))
    return peak_bytes(cost.problem, cost.rows)


def transfers_share(line: Line, folder: Path) -> float:
    """Return by which share the predicted time would be shorter if links took no time."""
    cluster = cluster_of(line, folder)
    free = _with_links(
        cluster,
        in_node_gb_per_s=FREE_GB_PER_S,
        across_gb_per_s=FREE_GB_PER_S,
        in_node_latency_us=NO_LATENCY_US,
        across_latency_us=NO_LATENCY_US,
    )
    return 1 - _simulated_ms(line, free) / _simulated_ms(line, cluster)


def cost_of_line(line: Line, cluster: Cluster) -> Cost:
    """Return the cost of the plan that a line is about."""
    plan = plan_of(line, cluster.world_size)
    workload = Workload(
        line["seq_len"], plan.global_batch, plan.accumulation, recompute=line["recompute"]
    )
    return cost_of(plan, cluster, model_of(line), workload)


def cluster_of(line: Line, folder: Path) -> Cluster:
    """Return the cluster that was measured in a line's session, with its emulated links.

    What passes such a link has left the multiprocessors long before it is over.
    """
    cluster = Cluster.load(folder / line["cluster"])
    if "link_gb_per_s" not in line:
        return cluster
    rate = line["link_gb_per_s"]
    return _with_links(
        cluster, in_node_gb_per_s=rate / IN_NODE_SHARE, across_gb_per_s=rate / ACROSS_SHARE
    )


def _with_links(cluster: Cluster, **links: float) -> Cluster:
    """Return the cluster with other links, which don't slow computing nor are slowed by it."""
    devices = tuple(replace(device, **links) for device in cluster.devices)
    overlap = replace(cluster.overlap or Overlap(), compute_slowdown=0.0, transfer_slowdown=0.0)
    return replace(cluster, devices=devices, overlap=overlap)


def _simulated_ms(line: Line, cluster: Cluster) -> float:
    cost = cost_of_line(line, cluster)
    if line["level"] == "layer":
        return 1e3 * sum(layer_seconds(cost, engine="event"))
    return 1e3 * simulate(cost, engine="event").step_seconds


def _link_seconds(line: Line, cluster: Cluster) -> float:
    ends = [cluster.devices[line[end]] for end in ("sender", "receiver")]
    near = ends[0].node == ends[1].node
    rates = [each.in_node_gb_per_s if near else each.across_gb_per_s for each in ends]
    latency = ends[1].in_node_latency_us if near else ends[1].across_latency_us
    reached = min(rates) * 1e9 * (IN_NODE_SHARE if near else ACROSS_SHARE)
    return float(latency * 1e-6 + line["num_bytes"] / reached)
