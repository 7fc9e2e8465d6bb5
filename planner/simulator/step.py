"""A step as sections, each a graph with how often it runs: a pass runs both ways over all layers.

gathers    embedding, output matrix and first layer; then the embedding looks its rows up
forward    one layer, as often as there are layers
logits     the output matrix both ways, while backward's first layer is gathered
backward   one layer
reduces    gradients of the first layer and of both matrices; the embedding's are summed before
optimizer  once a step
"""

from __future__ import annotations

import numpy as np

from hexiseq_triton.planner.fsdp import optimizer_seconds
from hexiseq_triton.planner.problem import Work
from hexiseq_triton.planner.simulator.graph import EMBEDDING, LOGITS, OPTIMIZER, Graph
from hexiseq_triton.planner.simulator.layer import Compiler
from hexiseq_triton.planner.traffic import BF16, FLOAT32

SECTIONS = ("gathers", "forward", "logits", "backward", "reduces", "optimizer")


def section(compiler: Compiler, name: str) -> Graph:
    """Return the graph of one of `SECTIONS`."""
    make = {
        "gathers": _gathers,
        "forward": Compiler.forward,
        "logits": _logits,
        "backward": Compiler.backward,
        "reduces": _reduces,
        "optimizer": _optimizer,
    }
    return make[name](compiler)


def repeats(compiler: Compiler, name: str) -> int:
    """Return how often a section runs in one step."""
    if name == "optimizer":
        return 1
    layers = compiler.cost.problem.model.layers if name in ("forward", "backward") else 1
    return compiler.cost.layout.accumulation * layers


def _gathers(compiler: Compiler) -> Graph:
    model, rows = compiler.cost.problem.model, compiler.cost.rows
    builder = compiler.builder()
    gather = builder.take(1)
    num_bytes = BF16 * (_outside(compiler) + model.parameters_per_layer)
    compiler.collective(builder, gather, num_bytes)
    lookup = builder.take(len(rows.rank))
    moved = 2 * BF16 * model.hidden * rows.tokens  # read and written
    builder.compute(lookup, EMBEDDING, rows.rank, moved / compiler.links.rates.memory[rows.rank], 0)
    builder.after(lookup, gather)
    return builder.build()


def _logits(compiler: Compiler) -> Graph:
    cost = compiler.cost
    builder = compiler.builder()
    ops, gather = builder.take(len(cost.rows.rank)), builder.take(1)
    flops = (1 + Work.BACKWARD_LINEAR) * cost.problem.work.logits_per_token * cost.rows.tokens
    builder.compute(ops, LOGITS, cost.rows.rank, cost.logits_seconds, flops)
    compiler.collective(builder, gather, BF16 * cost.problem.model.parameters_per_layer)
    builder.after(gather, ops)
    return builder.build()


def _reduces(compiler: Compiler) -> Graph:
    model, rows = compiler.cost.problem.model, compiler.cost.rows
    builder = compiler.builder()
    summed, reduce = builder.take(len(rows.rank)), builder.take(1)
    moved = (BF16 + 2 * FLOAT32) * model.hidden * rows.tokens  # read, and added to a float32 sum
    builder.compute(summed, EMBEDDING, rows.rank, moved / compiler.links.rates.memory[rows.rank], 0)
    num_bytes = FLOAT32 * (_outside(compiler) + model.parameters_per_layer)
    compiler.collective(builder, reduce, num_bytes)
    builder.after(reduce, summed)
    return builder.build()


def _optimizer(compiler: Compiler) -> Graph:
    builder = compiler.builder()
    ranks = np.arange(compiler.links.world_size)
    builder.compute(
        builder.take(len(ranks)), OPTIMIZER, ranks, optimizer_seconds(compiler.cost.problem), 0
    )
    return builder.build()


def _outside(compiler: Compiler) -> int:
    """Return the parameters outside of layers."""
    model = compiler.cost.problem.model
    return model.parameters - model.layers * model.parameters_per_layer
