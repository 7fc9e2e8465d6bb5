"""A dry run: what a step of a plan takes on a cluster that needs not be there.

    from hexiseq_triton.planner.simulator import simulate, simulate_plan

    simulation = simulate_plan(plan, cluster, model)
    simulation.step_seconds, simulation.tokens_per_s, simulation.mfu

`simulate` takes a `Cost`, which is a layout with its prices; `simulate_plan` a plan. Prices of
computing, traffic and memory are the cost model's. Where that adds up closed forms, this runs the
operations against each other (`graph`): the fast engine in a few milliseconds, the event engine
with fair sharing of links.
"""

from hexiseq_triton.planner.simulator.conditions import Conditions
from hexiseq_triton.planner.simulator.layer import MODES, Mode
from hexiseq_triton.planner.simulator.simulation import (
    ENGINES,
    Engine,
    Section,
    Simulation,
    layer_seconds,
    simulate,
    simulate_plan,
)

__all__ = [
    "ENGINES",
    "MODES",
    "Conditions",
    "Engine",
    "Mode",
    "Section",
    "Simulation",
    "layer_seconds",
    "simulate",
    "simulate_plan",
]
