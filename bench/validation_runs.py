"""Measure the plans of validation_plans.json on fast and emulated slow ranks, as they are fixed.

    CUDA_VISIBLE_DEVICES=0,1 torchrun --standalone --nproc-per-node 2 --no-python \
        hexiseq profile --model llama3-8b --emulate-sms 132,44 --out two.yaml
    torchrun --standalone --nproc-per-node 4 --max-restarts 4 bench/validation_runs.py \
        --out run.jsonl --name NAME
    python bench/validate_simulator.py --add run.jsonl --cluster two.yaml --copies 2

On two GPUs: `--nproc-per-node 2`, and no copies. Writes a line a plan, in the format of
`validate_simulator.py`, as soon as it is measured: the median over some steps of the slowest rank's
time, what each rank did in another one by phase (docs/recorded-runs.md), and for whole steps each
rank's peak memory. Then lines of single kernels and links. A plan that takes longer than
`--patience` ends all processes; torchrun starts them anew, and they go on behind it: OUT.started
has the names of all that was begun.

Peak memory is what the allocator had reserved, and what else is taken on the GPU in the end: CUDA's
context, NCCL, memory that ranks share.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import triton
from measure import outside_allocator
from validation_cases import PLANS, Line, model_of, plan_of, read_cases
from validation_parts import kernel_lines, link_lines
from validation_training import Call, layer_both_ways, training_step

import hexiseq_triton as hx
from hexiseq_triton.context import ParallelContext
from hexiseq_triton.devices import local_device
from hexiseq_triton.emulation.emulate import Emulation, emulated
from hexiseq_triton.profiling.clock import timed
from hexiseq_triton.profiling.world import world
from hexiseq_triton.slow_start import unless_done_in
from hexiseq_triton.tracing.observe import device_name
from hexiseq_triton.tracing.phases import Phases, measured_phases


def main() -> None:
    options = _options()
    device = local_device()
    with world(device, timedelta(seconds=options.patience)):
        rank, size = dist.get_rank(), dist.get_world_size()
        cases, sms = read_cases(size, options.plans)
        emulation = Emulation(sms=tuple(sms)) if device.type == "cuda" else None
        with emulated(emulation, rank, size, device) as label:
            runs = Runs(options, device, _gathered(label))
            for case in runs.left(cases):
                with _patience(options.patience, case["case"]):
                    runs.measure(case)
            if runs.begin("kernels and links"):
                with _patience(options.patience, "kernels and links"):
                    runs.parts(cases[0])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="append lines to this file")
    parser.add_argument("--name", required=True, help="names what ran side by side")
    parser.add_argument("--plans", type=Path, default=PLANS, help="which plans")
    parser.add_argument("--samples", type=int, default=3, help="timed steps of each plan")
    parser.add_argument("--patience", type=float, default=60.0, help="most seconds of one plan")
    return parser.parse_args()


class Runs:
    """Measures and records; every method is a collective call.

    Args:
        options: see above.
        device: this process's.
        labels: what is emulated, by rank.
    """

    def __init__(
        self, options: argparse.Namespace, device: torch.device, labels: list[str]
    ) -> None:
        self._out: Path = options.out
        self._started = self._out.with_name(self._out.name + ".started")
        self._timeout = timedelta(seconds=options.patience)
        self._samples: int = options.samples
        self.device = device
        self._common = {
            "run": options.name,
            "card": f"{len(labels)}x {device_name(device)}",
            "emulated": labels,
            "date": datetime.now(UTC).date().isoformat(),
            "torch": torch.__version__,
            "triton": triton.__version__,
        }

    def left(self, cases: list[Line]) -> Iterator[Line]:
        """Yield the cases that were not begun before, one after the other."""
        yield from (case for case in cases if self.begin(case["case"]))

    def begin(self, name: str) -> bool:
        """Note that something begins; return whether it does so for the first time."""
        first = [False]
        if dist.get_rank() == 0:
            begun = self._started.read_text().splitlines() if self._started.exists() else []
            first = [name not in begun]
            if first[0]:
                self._started.write_text("\n".join([*begun, name]) + "\n")
        dist.broadcast_object_list(first, 0)
        return first[0]

    def measure(self, case: Line) -> None:
        """Measure one case and append its line."""
        began = time.monotonic()
        rate = case.get("link_gb_per_s")
        plan = plan_of(case, dist.get_world_size())
        self._forget()
        with hx.init(
            plan, device=self.device, timeout=self._timeout, symmetric_memory=rate is None
        ) as context:
            if rate is not None:
                Emulation(link_gb_per_s=(rate,) * plan.world_size).delay_links(context)
            spec = model_of(case)
            if case["level"] == "step":
                call = training_step(context, spec, case["recompute"])
            else:
                call = layer_both_ways(context, spec)
            call()
            samples = [self._seconds(call, case["level"]) for _ in range(self._samples)]
            phases = _gathered(_phases(context, call))
            more: Line = {"paths": _gathered(context.paths), "phases": phases}
            if case["level"] == "step" and self.device.type == "cuda":
                more |= _memory(self.device)
            del call
        ms = 1e3 * median(samples)
        more["samples_ms"] = [1e3 * seconds for seconds in samples]
        self._append(case | {"measured_ms": ms} | more)
        took = time.monotonic() - began
        self._say(f"{case['level']:6} {case['case']:44} {ms:9.3f} ms   ({took:.1f} s in all)")

    def parts(self, case: Line) -> None:
        """Measure single kernels and links."""
        for lines in _gathered(kernel_lines(model_of(case), self.device)):
            for line in lines:
                self._append(line)
        for line in link_lines(self.device):
            self._append(line)

    def _seconds(self, call: Call, level: str) -> float:
        """Return one call's seconds on the slowest rank.

        A step ends on the host, as it does in training; a layer is timed on the device alone, with
        the host ahead.
        """
        dist.barrier()
        began = time.perf_counter()
        own = timed(call, self.device) if level == "layer" else 0.0
        if level == "step":
            call()
            own = time.perf_counter() - began
        slowest = torch.tensor(own, device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)

    def _forget(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def _append(self, line: Line) -> None:
        if dist.get_rank() == 0:
            with self._out.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(self._common | line) + "\n")

    def _say(self, text: str) -> None:
        if dist.get_rank() == 0:
            print(text, flush=True)


def _gathered(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def _phases(context: ParallelContext, call: Call) -> Phases:
    """Return what this rank does in one more call, in seconds by phase."""
    dist.barrier()
    context.timeline.enabled = True
    call()
    context.timeline.enabled = False
    spans = context.timeline.spans()
    return measured_phases(spans) if spans else {}


def _memory(device: torch.device) -> Line:
    """Return each rank's peak, and what it consists of."""
    most, outside = torch.cuda.max_memory_reserved(device), outside_allocator(device)
    found = _gathered((most + outside, torch.cuda.max_memory_allocated(device), most, outside))
    names = ("peak_bytes", "allocated_bytes", "reserved_bytes", "outside_bytes")
    return {name: [each[at] for each in found] for at, name in enumerate(names)}


@contextmanager
def _patience(seconds: float, what: str) -> Iterator[None]:
    """End this process if what runs inside takes longer: nothing else ends a hanging kernel."""

    def end() -> None:
        print(f"{what}: not done after {seconds:g} s", file=sys.stderr, flush=True)
        os._exit(1)

    with unless_done_in(seconds, end):
        yield


if __name__ == "__main__":
    main()
