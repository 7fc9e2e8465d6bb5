"""Put the simulator beside recorded runs; needs no GPU.

    python bench/validate_simulator.py
    python bench/validate_simulator.py --add RUN.jsonl --cluster CLUSTER.yaml [--copies 2]

Reads `bench/results/simulator/runs.jsonl`, one measurement a line, and predicts each anew from the
cluster file that `hexiseq profile` wrote in the same session. `--add` appends a session's lines,
such as those of `validation_runs.py`, and keeps its cluster file beside them: with `--copies` that
of as many GPUs for each that was profiled. Fields of a line:

    run, case, level    what was measured together; its name; kernel, link, layer or step
    cluster             name of the cluster file; `fitted_on` says on how many GPUs it was measured
    emulated            of each rank, "" for a GPU as it is
    link_gb_per_s       of each rank's emulated link, which then counts; left out, those measured do
    measured_ms         of the slowest rank, a median
    kernel              gpu or rank, head_dim, tokens, and flops of each work it does (as in cluster
                        files)
    link                sender, receiver, num_bytes
    layer, step         model, seq_len, recompute, chunk_tokens, window, and replicas: of each its
                        groups as [ranks, tokens, heads]; peak_bytes by rank where it was measured

A layer is forward and backward without FSDP. Errors are predicted / measured - 1. Tau and regret
compare plans of one run, level, length and cluster: regret is how much longer the plan takes that
the simulator thinks fastest than the fastest one. What was asked for stands at the end, with what
came out; it is asked of plans whose rates were measured on two GPUs. Communication-bound are plans
that would take less than two thirds of the time if links took none.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import yaml
from validation_cases import Line
from validation_predictions import predicted_ms, predicted_peak_bytes, transfers_share

from hexiseq_triton.planner import Cluster
from hexiseq_triton.planner.files import read_mapping, read_text
from hexiseq_triton.planner.rates import Floats

RESULTS = Path(__file__).resolve().parent / "results"
FOLDER = RESULTS / "simulator"
LEVELS = ("kernel", "link", "layer", "step")
BOUND_BY_TRANSFERS = 1 / 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--add", type=Path, help="append the lines of this file")
    parser.add_argument("--cluster", type=Path, help="the cluster file of the same session")
    parser.add_argument("--copies", type=int, default=1, help="GPUs for each that was profiled")
    options = parser.parse_args()
    if (options.add is None) != (options.cluster is None):
        parser.error("--add and --cluster belong together")
    if options.add is not None:
        add(options.add, options.cluster, FOLDER, options.copies)
    print("\n".join(findings(FOLDER, RESULTS / "prediction.jsonl")))


def add(path: Path, cluster: Path, folder: Path, copies: int = 1) -> None:
    """Append a session's lines to the runs, and keep its cluster file."""
    fitted_on = Cluster.load(cluster).world_size
    folder.mkdir(parents=True, exist_ok=True)
    (folder / cluster.name).write_text(widened(cluster, copies), encoding="utf-8")
    lines = [{"fitted_on": fitted_on} | line | {"cluster": cluster.name} for line in read(path)]
    with (folder / "runs.jsonl").open("a", encoding="utf-8") as runs:
        runs.writelines(json.dumps(line) + "\n" for line in lines)


def widened(path: Path, copies: int) -> str:
    """Return a cluster file's text with `copies` of each GPU in place of one."""
    text = read_text(path)
    if copies == 1:
        return text
    content = read_mapping(path)
    for node in content["nodes"]:
        node["gpus"] = [name for name in node["gpus"] for _ in range(copies)]
    comments = [line for line in text.splitlines() if line.startswith("#")]
    comments.append(f"# each GPU that was measured stands here {copies} times")
    return "\n".join(comments) + "\n" + yaml.safe_dump(content, sort_keys=False, width=110)


def read(path: Path) -> list[Line]:
    """Return the lines of a file; none if there is no such file."""
    if not path.exists():
        return []
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]


# -------------------------------------------------------------------- findings


def findings(folder: Path, predictions: Path) -> list[str]:
    """Return what there is to say, line by line."""
    lines = read(folder / "runs.jsonl")
    judged = [line | {"predicted_ms": predicted_ms(line, folder)} for line in lines]
    found = [
        f"{line['level']:7} {line['run']:10} {line['case']:52} measured "
        f"{line['measured_ms']:9.3f} ms, simulated {line['predicted_ms']:9.3f} "
        f"({_error(line):+.1%})"
        for line in judged
    ]
    for level in LEVELS:
        found.append(f"{level}: {_errors([line for line in judged if line['level'] == level])}")
    at_the_time = [
        line | {"measured_ms": line["median_ms"]}
        for line in read(predictions)
        if "predicted_ms" in line
    ]
    found.append(f"layer, the cost model when it ran: {_errors(at_the_time)}")
    found += [_ranking(lines) for lines in ranked(judged)]
    memory = [memory_errors(line, folder) for line in lines if "peak_bytes" in line]
    found.append(f"peak memory, {len(memory)} runs: {_memory(memory)}")
    return [*found, "", "Asked for:", *_asked(judged, folder)]


def _error(line: Line) -> float:
    return float(line["predicted_ms"] / line["measured_ms"] - 1)


def _errors(lines: Sequence[Line]) -> str:
    if not lines:
        return "nothing was measured"
    errors = np.array([_error(line) for line in lines])
    return (
        f"{len(lines)} measured, error {np.abs(errors).mean():.1%} on average, "
        f"{np.abs(errors).max():.1%} at most, bias {errors.mean():+.1%}"
    )


def ranked(judged: Iterable[Line]) -> list[list[Line]]:
    """Return the plans that can be compared with each other, two or more each."""
    groups = defaultdict(list)
    for line in judged:
        if line["level"] in ("layer", "step"):
            groups[line["run"], line["level"], line["seq_len"], line["cluster"]].append(line)
    return [lines for lines in groups.values() if len(lines) > 1]


def _ranking(lines: Sequence[Line]) -> str:
    first, times = lines[0], _times(lines)
    return (
        f"{first['run']}, {first['level']} at {first['seq_len']} tokens, {first['cluster']}, "
        f"{len(lines)} plans: tau {kendall_tau(*times):.2f}, regret {regret(*times):.1%}"
    )


def _times(lines: Sequence[Line]) -> tuple[list[float], list[float]]:
    return [line["measured_ms"] for line in lines], [line["predicted_ms"] for line in lines]


def kendall_tau(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """Return (pairs in the same order - pairs in the other) / all pairs; 1 is the same ranking."""
    return float(np.mean(_signs(measured, predicted)))


def _signs(measured: Sequence[float], predicted: Sequence[float]) -> list[float]:
    return [
        float(np.sign(measured[a] - measured[b]) * np.sign(predicted[a] - predicted[b]))
        for a, b in combinations(range(len(measured)), 2)
    ]


def regret(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """Return how much longer the predicted best takes than the measured best, as a share."""
    return measured[int(np.argmin(predicted))] / min(measured) - 1


def memory_errors(line: Line, folder: Path) -> Floats:
    """Return predicted / measured - 1 of each rank."""
    measured = np.array(line["peak_bytes"], dtype=float)
    return predicted_peak_bytes(line, folder) / measured - 1


def _memory(runs: Sequence[Floats]) -> str:
    if not runs:
        return "nothing was measured"
    errors = np.concatenate(runs)
    return f"predicted from {errors.min():+.1%} to {errors.max():+.1%} of what was measured"


# -------------------------------------------------------------------- what was asked for


def _asked(judged: Sequence[Line], folder: Path) -> list[str]:
    """Return a line for each thing that was asked for: what came out, and whether it will do."""
    plans = [line for line in judged if _counts(line)]
    found = _of_plans(plans, folder) if plans else {"20 plans, with rates of two GPUs: 0": False}
    for level in LEVELS:
        some = sum(line["level"] == level for line in judged)
        found[f"something at the level of a {level}: {some}"] = some > 0
    return [f"- {what}: {'met' if met else 'NOT MET'}" for what, met in found.items()]


def _of_plans(plans: Sequence[Line], folder: Path) -> dict[str, bool]:
    """Return what came out of one plan or more, and whether it will do."""
    bound = sum(transfers_share(line, folder) > BOUND_BY_TRANSFERS for line in plans)
    times = [line["measured_ms"] for line in plans]
    span, error = max(times) / min(times), float(np.mean([abs(_error(line)) for line in plans]))
    groups = [_times(lines) for lines in ranked(plans)]
    signs = [sign for group in groups for sign in _signs(*group)]
    tau = float(np.mean(signs)) if signs else 0.0
    worst = max((regret(*group) for group in groups), default=float("inf"))
    memory = [memory_errors(line, folder) for line in plans if "peak_bytes" in line]
    errors = np.concatenate([*memory, np.zeros(0)])
    below, above = errors.min(initial=0.0), errors.max(initial=0.0)
    four = sum(len(line["emulated"]) == 4 for line in plans)
    return {
        f"20 plans, with rates of two GPUs: {len(plans)}": len(plans) >= 20,
        f"20 of them on four GPUs: {four}": four >= 20,
        f"6 of them communication-bound: {bound}": bound >= 6,
        f"measured times that span 1.5x: {span:.1f}x": span >= 1.5,
        f"their time within 8% on average: {error:.1%}": error <= 0.08,
        f"tau 0.9 over all pairs that can be compared: {tau:.2f} of {len(signs)}": tau >= 0.9,
        f"regret 3% at most: {worst:.1%}": worst <= 0.03,
        f"peak memory of 12 runs: {len(memory)}": len(memory) >= 12,
        f"it never 3% under nor 12% over: {below:+.1%} to {above:+.1%}": (
            bool(memory) and bool(below >= -0.03) and bool(above <= 0.12)
        ),
    }


def _counts(line: Line) -> bool:
    """Return whether a line is of a plan for several GPUs, with rates measured on two."""
    if line["level"] not in ("layer", "step") or line["fitted_on"] > 2:
        return False
    return sum(len(ranks) for groups in line["replicas"] for ranks, _, _ in groups) > 1


if __name__ == "__main__":
    main()
