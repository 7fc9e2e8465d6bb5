"""FSDP2's transfers: parameters gathered for each layer, gradients reduce-scattered after it.

FSDP2 shards every parameter evenly over all ranks, idle ones included (`ParallelContext.mesh` is
flat). Parameters travel in bf16, gradients in float32. Layers are gathered anew in backward; the
embedding and the output matrix stay gathered from a pass's start to its end.
"""

from __future__ import annotations

from hexiseq_triton.planner.problem import Problem
from hexiseq_triton.planner.rates import Floats
from hexiseq_triton.planner.traffic import BF16, FLOAT32

OPTIMIZER_BYTES = 40
"""Clipping reads the gradient for its norm, and scales it. Adam, in one pass, reads parameter,
gradient and two moments, and writes all but the gradient. All in float32."""


def fsdp_seconds(problem: Problem) -> tuple[float, float]:
    """Return seconds to gather one layer's parameters, and to reduce-scatter its gradients."""
    layer = problem.model.parameters_per_layer * problem.rates.seconds_per_sharded_byte
    return BF16 * layer, FLOAT32 * layer


def nic_seconds(problem: Problem) -> tuple[Floats, Floats]:
    """Return how long each rank's NIC is at work in each of the two."""
    layer = problem.model.parameters_per_layer * problem.rates.nic_seconds_per_sharded_byte
    return BF16 * layer, FLOAT32 * layer


def boundary_seconds(problem: Problem) -> float:
    """Return seconds of FSDP's transfers in one pass that no computing hides.

    At its start embedding, output matrix and first layer are gathered, at backward's start the last
    layer; at its end the gradients of the first layer and of both matrices are still to be reduced.
    """
    gather, reduce_scatter = fsdp_seconds(problem)
    outside = problem.model.parameters - problem.model.layers * problem.model.parameters_per_layer
    matrices = (BF16 + FLOAT32) * outside * problem.rates.seconds_per_sharded_byte
    return matrices + 2 * gather + reduce_scatter


def optimizer_seconds(problem: Problem) -> Floats:
    """Return the optimizer's seconds on each rank; states are sharded evenly."""
    num_bytes = OPTIMIZER_BYTES * problem.model.parameters / problem.cluster.world_size
    result: Floats = num_bytes / problem.rates.memory
    return result
