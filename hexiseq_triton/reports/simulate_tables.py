"""What a simulation found, as lines and tables."""

from __future__ import annotations

from rich.table import Table

from hexiseq_triton.planner.rates import Floats
from hexiseq_triton.planner.simulator import Simulation


def summary_lines(simulation: Simulation) -> list[str]:
    """Return the findings for the whole step."""
    cost, step = simulation.cost, simulation.step_seconds
    workload, limit = cost.problem.workload, cost.memory_limit
    fullest = int((simulation.memory_bytes / limit).argmax())
    lines = [
        f"{step:.4g} s a step of {workload.step_tokens:,} tokens: "
        f"{simulation.tokens_per_s:,.0f} tokens/s, MFU {simulation.mfu:.1%}",
        f"exchange {simulation.mode}, engine {simulation.engine}; the cost model says "
        f"{cost.step_seconds:.4g} s ({cost.step_seconds / step - 1:+.1%})",
        "of their time, ranks on average compute {:.1%}, wait for transfers {:.1%}, and idle "
        "{:.1%}".format(*_shares(simulation)),
        f"rank {fullest} is the fullest: {simulation.memory_bytes[fullest] / 1e9:.1f} of "
        f"{limit[fullest] / 1e9:.1f} GB",
    ]
    return lines + _condition_lines(simulation)


def _shares(simulation: Simulation) -> list[float]:
    """Return the shares of computing, exposed transfers and idling, over all ranks."""
    parts = [
        _mean(each)
        for each in (
            simulation.compute_seconds,
            simulation.exposed_seconds,
            simulation.idle_seconds,
        )
    ]
    return [part / sum(parts) for part in parts]


def _condition_lines(simulation: Simulation) -> list[str]:
    conditions = simulation.conditions
    slow = ", ".join(f"rank {r} {f:g} times" for r, f in sorted(conditions.stragglers.items()))
    found = {
        f"jitter {conditions.jitter:g}, seed {conditions.seed}": conditions.jitter > 0,
        f"compute longer: {slow}": bool(slow),
        f"uplinks oversubscribed {conditions.oversubscription:g} times": (
            conditions.oversubscription > 1
        ),
        "copy engines move keys and values in nodes": conditions.copy_engine,
    }
    return [line for line, holds in found.items() if holds]


def section_table(simulation: Simulation) -> Table:
    """Return one row a section; computing, exposed and idle are means over ranks."""
    table = Table(caption="milliseconds of one run; means over ranks")
    table.add_column("section")
    for name in ("runs", "length", "computing", "exposed", "idle", "share of step"):
        table.add_column(name, justify="right")
    for name, part in simulation.sections.items():
        times = (part.seconds, *map(_mean, (part.computing, part.exposed, part.idle)))
        share = part.repeats * part.seconds / simulation.step_seconds
        table.add_row(
            name,
            str(part.repeats),
            *(f"{1e3 * each:.3f}" for each in times),
            f"{share:.1%}",
        )
    return table


def rank_table(simulation: Simulation) -> Table:
    """Return one row a rank."""
    table = Table(caption="seconds of one step; GB at the peak")
    table.add_column("rank", justify="right")
    table.add_column("GPU")
    for name in ("computing", "exposed", "idle", "memory", "limit"):
        table.add_column(name, justify="right")
    columns = zip(
        simulation.cost.problem.cluster.devices,
        simulation.compute_seconds,
        simulation.exposed_seconds,
        simulation.idle_seconds,
        simulation.memory_bytes / 1e9,
        simulation.cost.memory_limit / 1e9,
        strict=True,
    )
    for device, *seconds, memory, limit in columns:
        shown = [f"{each:.4g}" for each in seconds]
        table.add_row(str(device.rank), device.gpu, *shown, f"{memory:.1f}", f"{limit:.1f}")
    return table


def _mean(values: Floats) -> float:
    return float(values.mean())
