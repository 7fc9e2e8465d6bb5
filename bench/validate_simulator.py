"""Put the simulator beside recorded runs; needs no GPU.

    python bench/validate_simulator.py
    python bench/validate_simulator.py --add RUN.jsonl --cluster CLUSTER.yaml

Reads `bench/results/simulator/runs.jsonl`, one measurement a line, and predicts each anew from the
cluster file that `hexiseq profile` wrote in the same session. `--add` appends a session's lines and
keeps its cluster file beside them. Also reads `bench/results/prediction.jsonl` of `mixed_speed.py`,
whose lines hold what the cost model said at the time. Fields of a line:

    run, case, level    what was measured together; its name; kernel, link, layer or step
    cluster             name of the cluster file; `fitted_on` says on how many GPUs it was measured
    emulated            of each rank, "" for a GPU as it is
    measured_ms         of the slowest rank, a median
    kernel              gpu, head_dim, tokens, and flops of each work it does (as in cluster files)
    link                sender, receiver, num_bytes
    layer, step         model, seq_len, recompute, chunk_tokens, window, and replicas: of each its
                        groups as [ranks, tokens, heads]; peak_bytes by rank where it was measured

A layer is forward and backward without FSDP. Errors are predicted / measured - 1. Tau and regret
compare plans of one run, level and length: regret is how much longer the plan takes that the
simulator thinks fastest than the fastest one. What was asked for and not run is listed at the end.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from hexiseq_triton.planner import Cluster, ExchangePlan, ModelSpec, Plan, Split, Workload
from hexiseq_triton.planner.cost import Cost
from hexiseq_triton.planner.explain import cost_of
from hexiseq_triton.planner.files import build
from hexiseq_triton.planner.memory import peak_bytes
from hexiseq_triton.planner.rates import ACROSS_SHARE, IN_NODE_SHARE, computing_rate
from hexiseq_triton.planner.simulator import layer_seconds, simulate

RESULTS = Path(__file__).resolve().parent / "results"
FOLDER = RESULTS / "simulator"
LEVELS = ("kernel", "link", "layer", "step")
Line = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--add", type=Path, help="append the lines of this file")
    parser.add_argument("--cluster", type=Path, help="the cluster file of the same session")
    options = parser.parse_args()
    if (options.add is None) != (options.cluster is None):
        parser.error("--add and --cluster belong together")
    if options.add is not None:
        add(options.add, options.cluster, FOLDER)
    print("\n".join(findings(FOLDER, RESULTS / "prediction.jsonl")))


def add(path: Path, cluster: Path, folder: Path) -> None:
    """Append a session's lines to the runs, and keep its cluster file."""
    Cluster.load(cluster)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(cluster, folder / cluster.name)
    lines = [line | {"cluster": cluster.name} for line in read(path)]
    with (folder / "runs.jsonl").open("a", encoding="utf-8") as runs:
        runs.writelines(json.dumps(line) + "\n" for line in lines)


def read(path: Path) -> list[Line]:
    """Return the lines of a file; none if there is no such file."""
    if not path.exists():
        return []
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]


# -------------------------------------------------------------------- predictions


def predicted_ms(line: Line, folder: Path) -> float:
    """Return what is predicted for a line, in milliseconds."""
    cluster = Cluster.load(folder / line["cluster"])
    if line["level"] == "kernel":
        gpu, shape = cluster.gpus[line["gpu"]], (line["head_dim"], line["tokens"])
        works = line["flops"].items()
        return 1e3 * sum(flops / computing_rate(gpu, work, *shape).value for work, flops in works)
    if line["level"] == "link":
        return 1e3 * _link_seconds(line, cluster)
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


def cost_of_line(line: Line, cluster: Cluster) -> Cost:
    """Return the cost of the plan that a line is about."""
    model = line["model"]
    spec = ModelSpec.load(model) if isinstance(model, str) else build(ModelSpec, model, "model")
    plan = Plan.from_splits(
        *(
            [Split(tuple(tokens), tuple(heads), tuple(ranks)) for ranks, tokens, heads in groups]
            for groups in line["replicas"]
        ),
        num_kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        world_size=cluster.world_size,
        exchange=ExchangePlan(chunk_tokens=line["chunk_tokens"], window=line["window"]),
    )
    batch = plan.global_batch
    workload = Workload(line["seq_len"], batch, plan.accumulation, recompute=line["recompute"])
    return cost_of(plan, cluster, spec, workload)


# -------------------------------------------------------------------- findings


def findings(folder: Path, predictions: Path) -> list[str]:
    """Return what there is to say, line by line."""
    lines = read(folder / "runs.jsonl")
    judged = [line | {"predicted_ms": predicted_ms(line, folder)} for line in lines]
    found = []
    for line in judged:
        error = line["predicted_ms"] / line["measured_ms"] - 1
        found.append(
            f"{line['level']:7} {line['run']:10} {line['case']:36} measured "
            f"{line['measured_ms']:9.3f} ms, simulated {line['predicted_ms']:9.3f} ({error:+.1%})"
        )
    for level in LEVELS:
        found.append(f"{level}: {_errors([line for line in judged if line['level'] == level])}")
    at_the_time = [
        line | {"measured_ms": line["median_ms"]}
        for line in read(predictions)
        if "predicted_ms" in line
    ]
    found.append(f"layer, the cost model when it ran: {_errors(at_the_time)}")
    found += _rankings(judged)
    memory = [_memory_errors(line, folder) for line in lines if "peak_bytes" in line]
    found.append(f"peak memory, {len(memory)} runs: {_memory(memory)}")
    return [*found, "", "Asked for and not run:", *_missing(judged, len(memory))]


def _errors(lines: Sequence[Line]) -> str:
    if not lines:
        return "nothing was measured"
    errors = np.array([line["predicted_ms"] / line["measured_ms"] - 1 for line in lines])
    return (
        f"{len(lines)} measured, error {np.abs(errors).mean():.1%} on average, "
        f"{np.abs(errors).max():.1%} at most, bias {errors.mean():+.1%}"
    )


def _rankings(judged: Iterable[Line]) -> list[str]:
    groups = defaultdict(list)
    for line in judged:
        if line["level"] in ("layer", "step"):
            groups[line["run"], line["level"], line["seq_len"]].append(line)
    found = []
    for (run, level, seq_len), lines in groups.items():
        if len(lines) > 1:
            measured = [line["measured_ms"] for line in lines]
            predicted = [line["predicted_ms"] for line in lines]
            found.append(
                f"{run}, {level} at {seq_len} tokens, {len(lines)} plans: tau "
                f"{kendall_tau(measured, predicted):.2f}, regret {regret(measured, predicted):.1%}"
            )
    return found


def kendall_tau(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """Return (pairs in the same order - pairs in the other) / all pairs; 1 is the same ranking."""
    signs = [
        np.sign(measured[a] - measured[b]) * np.sign(predicted[a] - predicted[b])
        for a, b in combinations(range(len(measured)), 2)
    ]
    return float(np.mean(signs))


def regret(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """Return how much longer the predicted best takes than the measured best, as a share."""
    return measured[int(np.argmin(predicted))] / min(measured) - 1


def _memory_errors(line: Line, folder: Path) -> list[float]:
    """Return predicted / measured - 1 of each rank."""
    cost = cost_of_line(line, Cluster.load(folder / line["cluster"]))
    predicted = peak_bytes(cost.problem, cost.rows)
    return list(predicted / np.array(line["peak_bytes"], dtype=float) - 1)


def _memory(runs: Sequence[Sequence[float]]) -> str:
    if not runs:
        return "nothing was measured"
    errors = np.concatenate(runs)
    return f"predicted from {errors.min():+.1%} to {errors.max():+.1%} of what was measured"


def _missing(judged: Sequence[Line], num_memory: int) -> list[str]:
    """Return what the validation should have and has not."""
    plans = [line for line in judged if line["level"] == "step"]
    spread = [line["measured_ms"] for line in plans]
    fitted = {line["fitted_on"] for line in plans if line["fitted_on"] > 2}
    counts = {
        f"20 plans measured as whole steps: {len(plans)} were": len(plans) >= 20,
        "measured times that span 1.5x": bool(spread) and max(spread) >= 1.5 * min(spread),
        "rates fitted on 2 GPUs, steps run on 4": bool(plans) and not fitted,
        f"peak memory of 12 runs: {num_memory} were measured": num_memory >= 12,
    }
    for level in LEVELS[:3]:
        some = any(line["level"] == level for line in judged)
        counts[f"anything at the level of a {level}"] = some
    return [f"- {what}" for what, done in counts.items() if not done] or ["- nothing"]


if __name__ == "__main__":
    main()
