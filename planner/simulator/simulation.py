"""A simulated step: how long it takes, what every rank does in it, and when."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from hexiseq_triton.errors import ConfigError, PlanError
from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.cost import Cost
from hexiseq_triton.planner.explain import check_made_for, cost_of, workload_of
from hexiseq_triton.planner.memory import peak_bytes
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.plans import Exchange, Plan
from hexiseq_triton.planner.rates import Floats
from hexiseq_triton.planner.simulator.conditions import Conditions
from hexiseq_triton.planner.simulator.fair_sharing import fair_sharing
from hexiseq_triton.planner.simulator.graph import Graph
from hexiseq_triton.planner.simulator.layer import MODES, Compiler, Mode
from hexiseq_triton.planner.simulator.longest_path import longest_path
from hexiseq_triton.planner.simulator.noise import disturbed
from hexiseq_triton.planner.simulator.occupancy import (
    computing_seconds,
    exposed_seconds,
    fullest_port_seconds,
)
from hexiseq_triton.planner.simulator.step import SECTIONS, repeats, section
from hexiseq_triton.planner.workload import Workload
from hexiseq_triton.planner.write import noun_digest

Engine = Literal["fast", "event"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
_RUN = {"fast": longest_path, "event": fair_sharing}
_MODE_OF: dict[Exchange, Mode] = {
    "routes": "direct",
    "rotation": "async",
    "double_ring": "double_ring",
    "all_gather": "all_gather",
}
_BUFFERS_OF: dict[Mode, Exchange] = {
    "direct": "routes",
    "async": "rotation",
    "lockstep": "rotation",
    "streamed": "rotation",
    "double_ring": "double_ring",
    "all_gather": "all_gather",
}
DRAWS = 8
"""How many times a section that runs more often is drawn under jitter; the mean counts."""


@dataclass(frozen=True)
class Section:
    """One part of a step, simulated once. Seconds count from its start; all ranks begin together.

    Attributes:
        name: one of `step.SECTIONS`.
        repeats: how often it runs in a step.
        graph: its operations.
        start: when each starts; under jitter in the first draw, as all but `seconds`.
        stop: when each stops.
        length: until the last one stops, and the fullest port is done.
        seconds: the same; under jitter the mean of all draws.
        world_size: ranks of the cluster.
    """

    name: str
    repeats: int
    graph: Graph
    start: Floats
    stop: Floats
    length: float
    seconds: float
    world_size: int

    @cached_property
    def computing(self) -> Floats:
        """Seconds in which each rank computes."""
        return computing_seconds(self.graph, self.start, self.stop, self.world_size)

    @cached_property
    def exposed(self) -> Floats:
        """Seconds in which each rank's bytes are under way and it doesn't compute."""
        late = self.length - float(self.stop.max(initial=0.0))  # of ports that had to share
        found = exposed_seconds(self.graph, self.start, self.stop, self.world_size)
        result: Floats = np.maximum(found + late, 0.0)  # differences round below nothing
        return result

    @cached_property
    def idle(self) -> Floats:
        """Seconds in which a rank neither computes nor moves bytes."""
        idle = self.length - self.computing - self.exposed
        result: Floats = np.maximum(idle, 0.0)
        return result


@dataclass(frozen=True)
class Simulation:
    """What one optimizer step of a layout takes. Arrays run over ranks."""

    cost: Cost
    mode: Mode
    engine: Engine
    conditions: Conditions
    sections: dict[str, Section]

    @cached_property
    def step_seconds(self) -> float:
        return sum(part.repeats * part.seconds for part in self.sections.values())

    @property
    def layer_seconds(self) -> tuple[float, float]:
        """One layer forward and backward, in seconds, with FSDP's transfers beside it."""
        return self.sections["forward"].seconds, self.sections["backward"].seconds

    @property
    def tokens_per_s(self) -> float:
        return self.cost.problem.workload.step_tokens / self.step_seconds

    @cached_property
    def flops(self) -> float:
        """FLOPs of one step that the model asks for: forward once and twice that backward.

        What backward computes again doesn't count, nor that attention's takes 2.5 times forward's.
        """
        forward = self.sections["forward"].graph.flops.sum()
        logits = self.sections["logits"].graph.flops.sum()
        passes = self.cost.layout.accumulation
        return float(passes * (3 * self.cost.problem.model.layers * forward + logits))

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: the share of all GPUs' dense peak that training reaches."""
        cluster = self.cost.problem.cluster
        peak = sum(cluster.gpu(rank).dense_tflops.value for rank in range(cluster.world_size))
        return self.flops / (self.step_seconds * peak * 1e12)

    @cached_property
    def compute_seconds(self) -> Floats:
        """Seconds of a step in which each rank computes."""
        return self._over_step("computing")

    @cached_property
    def exposed_seconds(self) -> Floats:
        """Seconds of a step in which each rank's bytes are under way and it doesn't compute."""
        return self._over_step("exposed")

    @cached_property
    def idle_seconds(self) -> Floats:
        """Seconds of a step in which each rank only waits for others."""
        return self._over_step("idle")

    @cached_property
    def memory_bytes(self) -> Floats:
        """Peak of each rank, by the memory model, with the buffers of this mode."""
        cost = self.cost
        return peak_bytes(cost.problem, cost.rows, _BUFFERS_OF[self.mode])

    def _over_step(self, name: str) -> Floats:
        parts = [part.repeats * getattr(part, name) for part in self.sections.values()]
        return np.asarray(np.sum(parts, axis=0), dtype=np.float64)


def simulate(
    cost: Cost,
    *,
    mode: Mode | None = None,
    engine: Engine = "fast",
    conditions: Conditions | None = None,
) -> Simulation:
    """Simulate one optimizer step.

    Args:
        cost: a layout with its prices (`planner.cost.evaluate`).
        mode: how keys and values travel between groups; the layout's own if left out. "direct" is
            what the runtime does.
        engine: "fast" takes transfers of a port one after the other; "event" lets all that are
            under way share it fairly.
        conditions: jitter, stragglers, oversubscribed uplinks, copy engines; none if left out.

    Raises:
        ConfigError: if there is no such mode or engine, or a straggler is no rank.
    """
    compiler = Compiler(cost, *_checked(cost, mode, engine, conditions))
    sections = {name: _section(compiler, name, engine) for name in SECTIONS}
    return Simulation(cost, compiler.mode, engine, compiler.conditions, sections)


def layer_seconds(
    cost: Cost,
    *,
    mode: Mode | None = None,
    engine: Engine = "fast",
    conditions: Conditions | None = None,
) -> tuple[float, float]:
    """Return seconds of one layer forward and backward by itself, without FSDP; see `simulate`.

    Jitter is drawn once.
    """
    compiler = Compiler(cost, *_checked(cost, mode, engine, conditions), fsdp=False)
    forward, backward = (
        _drawn(compiler, graph(), engine, (index, 0))[1]
        for index, graph in enumerate((compiler.forward, compiler.backward))
    )
    return forward, backward


def simulate_plan(
    plan: Plan,
    cluster: Cluster,
    model: ModelSpec,
    workload: Workload | None = None,
    *,
    mode: Mode | None = None,
    engine: Engine = "fast",
    conditions: Conditions | None = None,
) -> Simulation:
    """Simulate one optimizer step of a plan.

    Args:
        plan: from the planner or by hand.
        cluster: the one it is for.
        model: the one it is for.
        workload: left out, what the plan says: one document a sequence, and full recomputing if it
            doesn't say.
        mode, engine, conditions: see `simulate`.

    Raises:
        PlanError: if the plan contradicts itself, or doesn't fit the cluster, model or workload.
        ConfigError: see `simulate`.
    """
    plan.validate()
    workload = workload or workload_of(plan)
    check_fit(plan, cluster, model, workload)
    cost = cost_of(plan, cluster, model, workload)
    return simulate(cost, mode=mode, engine=engine, conditions=conditions)


def check_fit(plan: Plan, cluster: Cluster, model: ModelSpec, workload: Workload) -> None:
    """Check that a plan is for this cluster, model and workload.

    Raises:
        PlanError: naming the first thing that differs, with both values.
    """
    check_made_for(plan, cluster, model)
    wanted = {
        "tokens a sequence": (plan.seq_len, workload.seq_len),
        "sequences a step": (plan.global_batch, workload.global_batch),
    }
    for what, (planned, given) in wanted.items():
        if planned != given:
            raise PlanError(
                f"the plan is for {planned} {what} and was given {given}; give the workload it was "
                "made for, or plan again"
            )
    # the planner may have been free to choose the passes
    digests = {noun_digest(workload), noun_digest(replace(workload, accumulation=None))}
    if plan.made_from.get("workload") not in (None, *digests):
        raise PlanError(
            "the plan was made for other documents in a sequence; give their lengths "
            "(--documents), or plan again"
        )


def _checked(
    cost: Cost, mode: Mode | None, engine: Engine, conditions: Conditions | None
) -> tuple[Mode, Conditions]:
    """Return the mode and the conditions to simulate with."""
    conditions = conditions or Conditions()
    conditions.check_ranks(cost.problem.cluster.world_size)
    if engine not in ENGINES:
        raise ConfigError(f"engine is {engine!r}; one of {', '.join(ENGINES)}")
    return _mode(cost, mode), conditions


def _mode(cost: Cost, mode: Mode | None) -> Mode:
    if mode is not None and mode not in MODES:
        raise ConfigError(f"mode is {mode!r}; one of {', '.join(MODES)}")
    found: Mode = mode or _MODE_OF[cost.layout.exchange]
    if found == "all_gather" and cost.rows.group_sizes.max() > 1:
        raise ConfigError("all_gather is simulated for groups of one rank only; name another mode")
    return found


def _section(compiler: Compiler, name: str, engine: Engine) -> Section:
    graph, times = section(compiler, name), repeats(compiler, name)
    draws = min(DRAWS, times) if compiler.conditions.jitter else 1
    found = [_drawn(compiler, graph, engine, (SECTIONS.index(name), draw)) for draw in range(draws)]
    lengths = [length for _, length in found]
    (start, stop), length = found[0]
    mean = float(np.mean(lengths))
    return Section(name, times, graph, start, stop, length, mean, compiler.links.world_size)


def _drawn(
    compiler: Compiler, graph: Graph, engine: Engine, key: tuple[int, int]
) -> tuple[tuple[Floats, Floats], float]:
    """Run a graph under one draw of the jitter; return starts and stops, and its length."""
    conditions = compiler.conditions
    drawn = disturbed(graph, conditions, (conditions.seed, *key))
    start, stop = _RUN[engine](drawn)
    return (start, stop), max(float(stop.max(initial=0.0)), fullest_port_seconds(drawn))
