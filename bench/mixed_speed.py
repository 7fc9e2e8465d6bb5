"""Fast and slow GPUs, emulated, two or four: the planner's plan beside the best even layout.

    torchrun --nproc-per-node 4 --no-python hexiseq profile --emulate-sms 132,132,44,44 \
        --out cluster.yaml
    torchrun --nproc-per-node 4 bench/mixed_speed.py --cluster cluster.yaml \
        --emulate-sms 132,132,44,44 --name NAME

One layer of a 7b shape, forward and backward, bf16, one causal document; medians of the slowest
rank. Ours is made by the planner from the profiled cluster file. `even` is the fastest of Ulysses,
zigzag ring and USP, by the same kernels and exchange. Read three things for 64K and 128K tokens:

    ours / best even   how many times faster; above 1 is faster
    ours / bound       N x sum over ranks of 1 / (time of that rank alone for the whole layer) is
                       what the GPUs could do together if nothing were lost
    prediction         the cost model's seconds beside the measured ones, for the layouts above and
                       for the six plans of SIX, which were written down before any measurement

Each line of a plan also says what every rank did in that time, in `phases_ms`: attention, waiting
for the all-to-all, for keys and for gradients, and the rest, which is token-wise work and the end.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import measure
import torch
import torch.distributed as dist
import triton
from mixed_layers import (
    alone,
    by_hand,
    layer,
    layer_flops,
    planned,
    predicted_seconds,
    under_plan,
)

import hexiseq_triton as hx
from hexiseq_triton.context import ParallelContext
from hexiseq_triton.devices import local_device
from hexiseq_triton.emulation.emulate import Emulation, emulated
from hexiseq_triton.errors import ConfigError
from hexiseq_triton.planner import Cluster, Plan
from hexiseq_triton.profiling.world import world

TOKENS = (65536, 131072)
SAMPLES = 3
MARGINS = (0, 8, 16)
"""Multiprocessors that attention leaves free while keys are under way."""
ALL = (32,)
EVEN = {
    2: {
        "ulysses": [((0, 1), (32, 32), (16, 16))],
        "zigzag ring": [((0,), (32,), ALL), ((1,), (32,), ALL)],
    },
    4: {
        "ulysses": [((0, 1, 2, 3), (16, 16, 16, 16), (8, 8, 8, 8))],
        "zigzag ring": [((r,), (16,), ALL) for r in range(4)],
        "usp, groups alike": [((0, 1), (16, 16), (16, 16)), ((2, 3), (16, 16), (16, 16))],
        "usp, groups mixed": [((0, 2), (16, 16), (16, 16)), ((1, 3), (16, 16), (16, 16))],
    },
}
"""Even layouts by the number of ranks: groups of ranks, shares of all tokens in 64ths, heads."""
SIX = {
    2: {
        "even heads": EVEN[2]["ulysses"],
        "even ring": EVEN[2]["zigzag ring"],
        "uneven ring 3:1": [((0,), (48,), ALL), ((1,), (16,), ALL)],
        "heads 3:1": [((0, 1), (48, 16), (24, 8))],
        "heads 2:1": [((0, 1), (42, 22), (21, 11))],
        "uneven ring 2:1": [((0,), (42,), ALL), ((1,), (22,), ALL)],
    },
    4: {
        "even heads": EVEN[4]["ulysses"],
        "even ring": EVEN[4]["zigzag ring"],
        "uneven ring 3:1": [
            ((0,), (24,), ALL),
            ((1,), (24,), ALL),
            ((2,), (8,), ALL),
            ((3,), (8,), ALL),
        ],
        "heads 3:1": [((0, 1, 2, 3), (24, 24, 8, 8), (12, 12, 4, 4))],
        "mixed groups, heads 3:1": [((0, 2), (24, 8), (24, 8)), ((1, 3), (24, 8), (24, 8))],
        "alike groups, tokens 2:1": [((0, 1), (22, 22), (16, 16)), ((2, 3), (10, 10), (16, 16))],
    },
}
"""Plans chosen for the prediction before anything was measured; at 64K tokens."""


def main() -> None:
    options = _options()
    if options.plan_into:
        for tokens in TOKENS:
            plan = planned(Cluster.load(options.cluster), tokens)
            plan.save(Path(options.plan_into) / f"{tokens}.json")
        return
    emulation = Emulation.parse(options.emulate_sms, None, None)
    device = local_device()
    torch.cuda.set_device(device)
    with world(device, timedelta(seconds=60)):
        rank, size = dist.get_rank(), dist.get_world_size()
        if size not in EVEN:
            raise ConfigError(f"{size} processes run; layouts are written down for 2 and for 4")
        planning = Planning(options.cluster) if rank == 0 else None
        with emulated(emulation, rank, size, device) as label:
            labels: list[Any] = [None] * size
            dist.all_gather_object(labels, label)
            Bench(options, device, labels, planning).run()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", required=True, help="cluster file of `hexiseq profile`")
    parser.add_argument("--emulate-sms", help="multiprocessors of each rank")
    parser.add_argument("--name", default=measure.RUN, help="names what ran side by side")
    parser.add_argument(
        "--seconds", type=float, default=150.0, help="start nothing new after these"
    )
    parser.add_argument("--plan-into", help="only plan, and write the plans into this folder")
    return parser.parse_args()


class Planning:
    """Plans for all lengths, made beside the first measurements: the search compiles first."""

    def __init__(self, cluster: str) -> None:
        self._folder = Path(tempfile.mkdtemp())
        words = [__file__, "--cluster", cluster, "--plan-into", str(self._folder)]
        ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        clean = {name: value for name, value in os.environ.items() if name not in ranks}
        self._process = subprocess.Popen([sys.executable, *words], env=clean)

    def plan(self, tokens: int) -> str:
        """Wait for the plan of a length and return its file's text."""
        if self._process.wait():
            raise RuntimeError("planning failed; see above")
        return (self._folder / f"{tokens}.json").read_text(encoding="utf-8")


class Measured(NamedTuple):
    """Milliseconds of the slowest rank, and of each rank by what it did."""

    ms: float
    phases: dict[str, list[float]]


class Bench:
    """Measures, records and prints; every method is a collective call."""

    def __init__(
        self,
        options: argparse.Namespace,
        device: torch.device,
        labels: list[str],
        planning: Planning | None,
    ) -> None:
        self.options, self.device, self.labels, self.planning = options, device, labels, planning
        self.cluster = Cluster.load(options.cluster)
        self.block = layer(device)
        self.world = dist.get_world_size()
        self.began = time.monotonic()
        self.ms: dict[tuple[int, str], float] = {}
        self._of_plan: dict[str, Measured] = {}

    def run(self) -> None:
        """Measure what matters most first; print what it comes to."""
        short, long = TOKENS
        self.bound(short)
        self.ours(short)
        for name in EVEN[self.world]:
            self.even(short, name)
        self.summarize(short)
        for name in SIX[self.world]:
            self.six(name)
        if not self.out_of_time():
            self.bound(long)
        self.ours(long)
        for name in EVEN[self.world]:
            self.even(long, name)
        self.summarize(long)
        self.margins("uneven ring 3:1")

    def ours(self, tokens: int) -> None:
        if not self.out_of_time():
            self.measured(tokens, "hexiseq", self.planned(tokens))

    def even(self, tokens: int, name: str) -> None:
        self.measured(tokens, f"even, {name}", by_hand(tokens, EVEN[self.world][name]))

    def six(self, name: str) -> None:
        self.measured(TOKENS[0], f"six: {name}", by_hand(TOKENS[0], SIX[self.world][name]))

    def summarize(self, tokens: int) -> None:
        """Record and print the planner's plan beside the best even layout and the bound."""
        found = {name: ms for (length, name), ms in self.ms.items() if length == tokens}
        even = {name: ms for name, ms in found.items() if name.startswith("even, ")}
        if not even or not {"hexiseq", "bound"} <= found.keys():
            return
        ours, bound = found["hexiseq"], found["bound"]
        name, best = min(even.items(), key=lambda entry: entry[1])
        self.record("mixed", f"layer-7b-t{tokens}", "even", best, {"layout": name})
        self.record("mixed", f"layer-7b-t{tokens}", "hexiseq", ours, {"bound_ms": bound})
        self.say(
            f"{tokens} tokens: ours {ours:.1f} ms, best even ({name}) {best:.1f} ms: "
            f"{best / ours:.2f}x faster, {bound / ours:.1%} of the bound ({bound:.1f} ms)"
        )

    def bound(self, tokens: int) -> None:
        """Measure each rank alone: in what time the GPUs would be done if nothing were lost."""
        call = alone(self.block, tokens, self.device)
        ms = self.milliseconds(call, together=False)
        del call
        _free()
        each: list[Any] = [None] * self.world
        dist.all_gather_object(each, ms)
        bound = 1 / sum(1 / ms for ms in each)
        self.record("mixed", f"layer-7b-t{tokens}", "bound", bound, {"alone_ms": each})
        alone_ms = ", ".join(f"{ms:.1f}" for ms in each)
        self.ms[tokens, "bound"] = bound
        self.say(f"{tokens} tokens, each rank alone: {alone_ms} ms; bound {bound:.1f} ms")

    def planned(self, tokens: int) -> Plan:
        """Return the plan that rank 0 has made, on all ranks."""
        text: list[Any] = [self.planning.plan(tokens) if self.planning else None]
        dist.broadcast_object_list(text, 0)
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write(text[0])
            file.flush()
            plan = Plan.load(file.name)
        for group in plan.replicas[0].groups:
            held = (f"{s.tokens} tokens, {s.num_q_heads} heads on {s.rank}" for s in group.ranks)
            self.say(f"  {'; '.join(held)}")
        return plan

    def measured(self, tokens: int, name: str, plan: Plan) -> None:
        """Measure a plan and put it beside its prediction, once, unless time is up."""
        if (tokens, name) in self.ms or self.out_of_time():
            return
        predicted = predicted_seconds(plan, self.cluster) * 1e3
        if plan.digest not in self._of_plan:
            self._of_plan[plan.digest] = self._run(plan)
        ms, phases = self._of_plan[plan.digest]
        self.ms[tokens, name] = ms
        more = {"predicted_ms": predicted, "error": predicted / ms - 1, "phases_ms": phases}
        self.record("prediction", f"layer-7b-t{tokens} {name}", "hexiseq", ms, more)
        self.say(
            f"{tokens:7} {name:32} {ms:9.2f} ms, predicted {predicted:9.2f} "
            f"({predicted / ms - 1:+.1%})"
        )
        for phase, each in phases.items():
            self.say(f"          {phase:20}" + "".join(f"{value:9.2f}" for value in each))

    def _run(self, plan: Plan) -> Measured:
        with hx.init(plan, device=self.device) as context:
            call = under_plan(self.block, context, plan.seq_len)
            ms = self.milliseconds(call)
            phases = self._phases(context, call)
            del call
        _free()
        return Measured(ms, phases)

    def _phases(
        self, context: ParallelContext, call: Callable[[], object]
    ) -> dict[str, list[float]]:
        """Return what each rank does in one more call: milliseconds by name, a value a rank."""
        context.timeline.enabled = True
        dist.barrier()
        with context.timeline.span("rest"):
            call()
        spans = context.timeline.spans()
        found: dict[str, float] = defaultdict(float)
        for span in spans:
            found[span.name] += span.seconds * 1e3
        found["rest"] -= sum(ms for name, ms in found.items() if name != "rest")
        each: list[Any] = [None] * self.world
        dist.all_gather_object(each, dict(found))
        names = dict.fromkeys(name for one in each for name in one)
        return {name: [round(one.get(name, 0.0), 2) for one in each] for name in names}

    def margins(self, name: str) -> None:
        """Measure a ring by messages while whole GPUs leave some multiprocessors to transfers.

        NCCL's kernels run beside an emulated rank's multiprocessors, which are left alone.
        """
        tokens = TOKENS[0]
        plan = by_hand(tokens, SIX[self.world][name])
        with hx.init(plan, device=self.device, symmetric_memory=False) as context:
            call = under_plan(self.block, context, tokens)
            for margin in MARGINS:
                if self.out_of_time():
                    break
                context.sm_margin = 0 if self.labels[context.rank] else margin
                ms = self.milliseconds(call)
                self.record("margin", f"layer-7b-t{tokens} {name}", f"sm_margin {margin}", ms, {})
                self.say(f"{tokens:7} {name}, sm_margin {margin}: {ms:.2f} ms")
            del call
        _free()

    def out_of_time(self) -> bool:
        """Return whether the time is up on any rank; the same on all."""
        late = torch.tensor(
            float(time.monotonic() - self.began > self.options.seconds), device=self.device
        )
        dist.all_reduce(late, dist.ReduceOp.MAX)
        return bool(late)

    def milliseconds(self, call: Callable[[], object], *, together: bool = True) -> float:
        """Return the median milliseconds of a call: of the slowest rank, or of this one alone."""
        call()
        found = []
        for _ in range(SAMPLES):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            start.record()
            call()
            stop.record()
            stop.synchronize()
            ms = torch.tensor(start.elapsed_time(stop), device=self.device)
            if together:
                dist.all_reduce(ms, dist.ReduceOp.MAX)
            found.append(float(ms))
        return median(found)

    def record(self, suite: str, case: str, impl: str, ms: float, more: dict[str, Any]) -> None:
        """Append a measurement; rank 0 writes."""
        if dist.get_rank():
            return
        tokens = int(case.split()[0].rpartition("t")[2])
        line = {
            "suite": suite,
            "case": case,
            "impl": impl,
            "direction": "forward+backward",
            "card": f"{self.world}x {torch.cuda.get_device_name()}, emulated",
            "emulated": self.labels,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "commit": measure.commit(),
            "date": datetime.now(UTC).date().isoformat(),
            "run": self.options.name,
            "median_ms": round(ms, 4),
            "tflops": round(layer_flops(tokens) / ms / 1e9 / self.world, 1),
            **more,
        }
        measure.RESULTS.mkdir(parents=True, exist_ok=True)
        with (measure.RESULTS / f"{suite}.jsonl").open("a") as lines:
            lines.write(json.dumps(line) + "\n")

    def say(self, text: str) -> None:
        if dist.get_rank() == 0:
            print(text, flush=True)


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
