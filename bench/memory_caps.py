"""Half of the ranks with 40 GB: what an even plan needs of them, and what the planner's needs.

    for layout in hexiseq even; do
        torchrun --nproc-per-node 4 bench/memory_caps.py --cluster cluster.yaml --layout $layout
    done

Trains three steps of four 8b layers on 48K tokens a rank, nothing computed again, under PyTorch's
allocator capped at what the ranks have ("emulated"). `hexiseq` is the planner's plan for such
ranks, `even` is Ulysses with equal tokens and heads. One line says what became of it: losses, or
which rank ran out of memory, and each rank's peak beside the memory model's. Contexts, NCCL and
buffers that ranks reach at each other lie outside PyTorch's allocator, and outside the cap.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, NoReturn

import measure
import torch
import torch.distributed as dist

import hexiseq_triton as hx
from hexiseq_triton.devices import local_device
from hexiseq_triton.emulation.emulate import Emulation
from hexiseq_triton.planner import Cluster, ModelSpec, Plan, Split
from hexiseq_triton.planner.explain import cost_of
from hexiseq_triton.planner.gpus import Figure
from hexiseq_triton.planner.memory import COMMUNICATOR_BYTES, CONTEXT_BYTES
from hexiseq_triton.planner.workload import Workload
from hexiseq_triton.profiling.world import world
from hexiseq_triton.train import Training
from hexiseq_triton.training_config import TrainingConfig

MODEL = {"layers": 4, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 256}
TOKENS_PER_RANK, STEPS = 49152, 3
CAPS_GB = {2: (140.0, 40.0), 4: (140.0, 140.0, 40.0, 40.0)}
"""Of each rank, by the number of ranks."""
RECOMPUTE: Literal["none"] = "none"
CUT_OFF = timedelta(seconds=30)
OUTSIDE_BYTES = CONTEXT_BYTES + 2 * COMMUNICATOR_BYTES
"""Of any rank, for the world and its group: not under the cap."""
Line = dict[str, Any]


def capped(cluster: Cluster) -> Cluster:
    """Return the cluster with rank 0's GPU for all, and memories that the caps leave."""
    spec = cluster.gpu(0)
    gpus, devices = {}, []
    for device, cap in zip(cluster.devices, CAPS_GB[cluster.world_size], strict=True):
        name = f"{cap:g} GB, emulated"
        memory = Figure(cap + OUTSIDE_BYTES / 1e9, "measured", "emulated")
        gpus[name] = replace(spec, memory_gb=memory)
        devices.append(replace(device, gpu=name))
    return Cluster(tuple(devices), gpus, cluster.overlap)


def plan_of(layout: str, cluster: Cluster, spec: ModelSpec) -> Plan:
    """Return the plan of a layout's name."""
    ranks = cluster.world_size
    if layout == "hexiseq":
        tokens = TOKENS_PER_RANK * ranks
        return hx.plan(cluster, spec, seq_len=tokens, global_batch=1, recompute=RECOMPUTE)
    even = Split((TOKENS_PER_RANK,) * ranks, (spec.heads // ranks,) * ranks)
    return Plan.from_splits([even], num_kv_heads=spec.kv_heads, head_dim=spec.head_dim)


def predicted_gb(plan: Plan, cluster: Cluster, spec: ModelSpec) -> list[float]:
    """Return the memory model's peak of each rank, in GB, all that a GPU holds."""
    workload = Workload(plan.seq_len, global_batch=1, accumulation=1, recompute=RECOMPUTE)
    cost = cost_of(plan, cluster, spec, workload)
    return [round(float(used) / 1e9, 1) for used in cost.memory_bytes]


def trained(
    plan: Plan, config: TrainingConfig, device: torch.device, fail: Callable[[Line], NoReturn]
) -> Line:
    """Train; return the losses and each rank's peak.

    A rank that runs out of memory calls `fail` while the others still wait for it.
    """
    with hx.init(plan, device=device, timeout=CUT_OFF) as context:
        try:
            training = Training(context, config)
            losses = [training.step().loss for _ in range(config.steps)]
        except torch.OutOfMemoryError as error:
            outcome = f"rank {context.rank} is out of memory"
            fail({"outcome": outcome, "error": str(error)[:200]})
        outside = measure.outside_allocator(device)
        most = torch.cuda.max_memory_reserved(device)
        used: list[Any] = [None] * plan.world_size
        dist.all_gather_object(used, (most + outside, outside))
        peaks, outsides = (
            [round(each / 1e9, 1) for each in found] for found in zip(*used, strict=True)
        )
        return {
            "outcome": f"trained {len(losses)} steps",
            "losses": losses,
            "peak_gb": peaks,
            "outside_gb": outsides,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", required=True, help="cluster file of `hexiseq profile`")
    parser.add_argument("--layout", choices=["hexiseq", "even"], required=True)
    parser.add_argument("--name", default=measure.RUN, help="names what ran side by side")
    options = parser.parse_args()
    cluster = capped(Cluster.load(options.cluster))
    folder = Path(tempfile.mkdtemp())
    model = folder / "model.yaml"
    model.write_text(json.dumps(MODEL), encoding="utf-8")  # JSON is YAML
    spec = ModelSpec.load(str(model))
    config = TrainingConfig(
        model=str(model), steps=STEPS, lr=1e-6, dtype="bf16", out=str(folder / "out"),
        recompute=RECOMPUTE, timeout_seconds=CUT_OFF.total_seconds(),
    )  # fmt: skip
    device = local_device()
    with world(device, CUT_OFF):
        rank = dist.get_rank()
        plans: list[Any] = [plan_of(options.layout, cluster, spec) if rank == 0 else None]
        dist.broadcast_object_list(plans, 0)
        plan: Plan = plans[0]
        emulation = Emulation(memory_gb=CAPS_GB[plan.world_size])
        predicted = {"predicted_gb": predicted_gb(plan, cluster, spec)}
        with emulation.applied(rank, plan.world_size, device) as label:

            def fail(found: Line) -> NoReturn:
                record(options, plan, found | predicted, label)
                os._exit(1)  # torchrun ends the others

            found = trained(plan, config, device, fail)
        if rank == 0:
            record(options, plan, found | predicted, label)


def record(options: argparse.Namespace, plan: Plan, found: Line, label: str) -> None:
    """Append what happened to bench/results, and print it."""
    caps = ", ".join(f"{cap:g}" for cap in CAPS_GB[plan.world_size])
    line = {
        "suite": "memory",
        "case": f"8b-4layers-t{plan.seq_len}, caps {caps} GB",
        "impl": options.layout,
        "card": f"{plan.world_size}x {torch.cuda.get_device_name()}, emulated",
        "emulated": label,
        "torch": torch.__version__,
        "commit": measure.commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "run": options.name,
        **found,
    }
    measure.RESULTS.mkdir(parents=True, exist_ok=True)
    with (measure.RESULTS / "memory.jsonl").open("a") as lines:
        lines.write(json.dumps(line) + "\n")
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
