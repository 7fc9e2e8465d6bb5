"""A lower bound on the step of every layout the runtime can carry out, under the cost model.

It holds for all partitions of the GPUs into head-parallel groups of any size and mix, in any number
of replicas, for any tokens and heads, in both arrangements, with any number of passes, and with
GPUs left idle. It is the largest of bounds that are proved in their modules and `docs/planner.md`:

    layers   all computing, spread over the GPUs as well as their rates allow, with FSDP beside it
    heads    the same, where no query head can be cut: by linear programs, if asked for
    cut      rows that must enter the GPUs or the nodes

and all add what every layout pays: FSDP's exposed transfers, once a pass, and the optimizer.
Memory says how few passes a step can have. Imports nothing of the search.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hexiseq_triton.planner.bound_cut import cut_seconds
from hexiseq_triton.planner.bound_heads import whole_heads_seconds
from hexiseq_triton.planner.bound_phases import phases_seconds
from hexiseq_triton.planner.fsdp import boundary_seconds, fsdp_seconds, optimizer_seconds
from hexiseq_triton.planner.logits import logits_seconds_per_token
from hexiseq_triton.planner.memory import FIXED, memory_model
from hexiseq_triton.planner.problem import Problem, Work
from hexiseq_triton.planner.rates import Floats, together


@dataclass(frozen=True)
class Bound:
    """What no step can fall below, in seconds, and what it is made of."""

    computing: float
    """The share of `layers` that is computing, in a step without any transfer."""
    layers: float
    cut: float
    passes: int
    """The fewest a step can have."""
    heads: float = 0.0
    """0 where it was not asked for, or would take too many compositions."""

    @property
    def seconds(self) -> float:
        return max(self.layers, self.heads, self.cut)

    @property
    def binding(self) -> str:
        """The name of the largest: "layers", "heads" or "cut"."""
        return max(("layers", "heads", "cut"), key=lambda name: float(getattr(self, name)))


def lower_bound_seconds(problem: Problem) -> float:
    """Return seconds that no layout's step can fall below; infinite if none fits in memory."""
    bound = lower_bound(problem)
    return math.inf if bound is None else bound.seconds


def lower_bound(problem: Problem, *, whole_heads: bool = False) -> Bound | None:
    """Return the bound and its parts; None if memory holds no layout.

    Args:
        problem: whose layouts.
        whole_heads: solve the linear programs of `heads` too: some tenths of a second.

    Raises:
        ImportError: if `whole_heads` and python-mip is not installed.
    """
    passes = fewest_passes(problem)
    if passes is None:
        return None
    layers, step_tokens = problem.model.layers, problem.workload.step_tokens
    forward, backward, logits = unit_seconds(problem)
    outside = step_tokens / float((1 / logits).sum())
    token_wise = layers * (forward[0] + backward[0]) + logits
    every_layout = passes * boundary_seconds(problem) + float(optimizer_seconds(problem).max())

    def step(directions: tuple[float, float]) -> float:
        gather, reduce_scatter = fsdp_seconds(problem)
        beside = passes * gather, passes * (gather + reduce_scatter)
        with_fsdp = (
            max(together(computing, transfer, problem.rates.overlap))
            for computing, transfer in zip(directions, beside, strict=True)
        )
        return layers * sum(with_fsdp) + outside + every_layout

    fluid = phases_seconds(problem, *forward), phases_seconds(problem, *backward)
    heads = 0.0
    if whole_heads:
        heads = step(
            (whole_heads_seconds(problem, *forward), whole_heads_seconds(problem, *backward))
        )
    return Bound(
        computing=layers * sum(fluid) + outside,
        layers=step(fluid),
        cut=cut_seconds(problem, passes, token_wise) + every_layout,
        passes=passes,
        heads=heads,
    )


def fewest_passes(problem: Problem) -> int | None:
    """Return the fewest passes whose tokens can fit in all GPUs together; None if no number does.

    Wherever a token lies, its own bytes and those of its query and KV heads after the all-to-all
    lie somewhere, beside what every GPU holds anyway.
    """
    workload, model, memory = problem.workload, problem.model, memory_model(problem)
    limit = problem.rates.memory_limit
    if (limit < memory.idle).any():
        return None
    room = (limit[:, None] - memory.moments[:, FIXED]).sum(axis=0)
    each = memory.whole_tokens(model)
    tokens = float((room[each > 0] / each[each > 0]).min())
    fitting = (n for n in workload.accumulations if workload.step_tokens / n <= tokens)
    return next(fitting, None)


def unit_seconds(problem: Problem) -> tuple[Floats, Floats, Floats]:
    """Return seconds of computing on each rank: of a layer forward, backward, and of the logits.

    The first two are [2, ranks]: what a token costs, and a (query, key) pair of all heads. Backward
    counts what it computes again. The logits, forward and backward, are [ranks], for a token.
    """
    rates, work = problem.rates, problem.work
    pair = work.attention_per_pair * problem.model.heads
    forward = np.stack([work.linear_per_token / rates.gemm_forward, pair / rates.attention_forward])
    backward = np.stack(
        [
            Work.BACKWARD_LINEAR * work.linear_per_token / rates.gemm_backward,
            Work.BACKWARD_ATTENTION * pair / rates.attention_backward,
        ]
    )
    if problem.workload.recompute == "full":
        backward = backward + forward
    return forward, backward, logits_seconds_per_token(problem)
