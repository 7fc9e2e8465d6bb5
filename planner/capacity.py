"""What memory holds: the roomiest layout, and the longest sequence that fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hexiseq_triton.planner.balance import Dealing, balanced_apart, key
from hexiseq_triton.planner.cost import Cost
from hexiseq_triton.planner.groupings import Grouping
from hexiseq_triton.planner.problem import Problem
from hexiseq_triton.planner.stages import Frame, Splitter

_STEP = 16
"""The longest sequence is found to so many tokens, or to a thousandth."""
_LONGEST = 1 << 40


def roomiest(splitter: Splitter) -> Cost:
    """Return the cost of the layout that leaves most memory, of a few that use it evenly.

    Fewest sequences a pass, all GPUs in one replica, tokens as memory has room. What heads take
    does not depend on the groups, but for receive buffers and for KV heads held twice.
    """
    workload = splitter.problem.workload
    passes = workload.accumulations[-1]
    sequences = workload.global_batch // passes
    dealings = [
        Dealing("as memory has room", grouping, sequences, 1) for grouping in _groupings(splitter)
    ]
    costs = balanced_apart(splitter, Frame("", passes), dealings)
    return min(costs, key=lambda cost: (not cost.fits, key(cost)))


def _groupings(splitter: Splitter) -> Iterator[Grouping]:
    heads, nodes = splitter.problem.model.heads, splitter.problem.cluster.ranks_by_node
    ranks = range(splitter.problem.cluster.world_size)
    yield tuple((rank,) for rank in ranks)
    if all(len(node) <= heads for node in nodes.values()):
        yield tuple(nodes.values())
    if len(ranks) <= heads:
        yield (tuple(ranks),)


def longest_seq_len(problem: Problem) -> int:
    """Return the longest sequence for which a layout fits in memory, a multiple of 16; else 0.

    The problem's own seq_len is not looked at, nor its documents.
    """
    low, high = 0, _STEP
    while high < _LONGEST and _fits(problem, high):
        low, high = high, 2 * high
    while high - low > max(_STEP, low // 1000):
        middle = (low + high) // 2 // _STEP * _STEP
        low, high = (middle, high) if _fits(problem, middle) else (low, middle)
    return low


def _fits(problem: Problem, seq_len: int) -> bool:
    workload = replace(problem.workload, seq_len=seq_len, documents=None)
    return roomiest(Splitter(replace(problem, workload=workload))).fits
