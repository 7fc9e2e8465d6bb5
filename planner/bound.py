"""A lower bound on the step, for every balanced layout of the GPUs, any tokens and any heads.

Phase by phase, work over the rate of all GPUs together: nobody finishes a layer sooner than a
single GPU with everyone's FLOP/s would. For groups g with token-wise rate A_g and attention rate
B_g, both phases of g take L_g (1/A_g + w/B_g) at least, with w attention work per token. The
slowest group takes at least N / sum_g f(A_g, B_g), f(A, B) = 1 / (1/A + w/B). f is concave and
homogeneous, so the sum is at most f(sum A, sum B): that of one group of all.

FSDP's gathers and reduce-scatters are the same for all layouts, so a layer cannot beat them either.
All other communication, memory and whole heads only add to it. Imports nothing of the search.
"""

from __future__ import annotations

from hexiseq_triton.planner.cost import fsdp_seconds, optimizer_seconds
from hexiseq_triton.planner.problem import Problem, Work


def lower_bound_seconds(problem: Problem) -> float:
    """Return seconds that no balanced layout's step can fall below, under the cost model."""
    workload, work, rates = problem.workload, problem.work, problem.rates
    tokens = workload.stream_tokens
    pairs = tokens * workload.pairs_per_token * problem.model.heads

    linear = work.linear_per_token * tokens / rates.gemm.sum()
    forward = linear + work.attention_per_pair * pairs / rates.attention_forward.sum()
    backward = (
        Work.BACKWARD_LINEAR * linear
        + Work.BACKWARD_ATTENTION * work.attention_per_pair * pairs / rates.attention_backward.sum()
    )
    again = 1 if workload.recompute == "full" else 0
    logits = (1 + Work.BACKWARD_LINEAR) * work.logits_per_token * tokens / rates.gemm.sum()
    gather, reduce_scatter = fsdp_seconds(problem)
    layer = max(forward, gather) + max(again * forward + backward, gather + reduce_scatter)
    one_pass = problem.model.layers * layer + logits
    return float(workload.accumulation * one_pass + optimizer_seconds(problem).max())
