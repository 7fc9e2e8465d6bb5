"""What a layout costs: seconds of a step, seconds and bytes of every rank.

The all-to-all synchronises a group, so one layer of a group takes, forward and backward each,

    max over ranks (token-wise) + all-to-all + max over ranks (attention with its KV exchange)
                                + all-to-all

A group of one has no all-to-all and no barrier. A layer takes as long as its slowest group, or as
FSDP's transfers for the next layer if those are longer; each slows the other a little. All-to-all,
exchange and FSDP share a NIC: a layer is never shorter than what they keep one at work together.
A step is

    passes * (layers * (forward + backward) + logits + FSDP's exposed transfers) + optimizer

Backward computes forward again where the workload recomputes. Times of computing are FLOPs over a
rate (`rates`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hexiseq_triton.planner.exchange import Attention, with_exchange
from hexiseq_triton.planner.fsdp import (
    boundary_seconds,
    fsdp_seconds,
    nic_seconds,
    optimizer_seconds,
)
from hexiseq_triton.planner.logits import logits_seconds_per_token
from hexiseq_triton.planner.memory import peak_bytes
from hexiseq_triton.planner.plans import Exchange
from hexiseq_triton.planner.problem import Layout, Problem, Work
from hexiseq_triton.planner.rates import Floats, Ints, Seconds, together
from hexiseq_triton.planner.rows import Rows
from hexiseq_triton.planner.sight import Sight, sight_of
from hexiseq_triton.planner.traffic import BF16, FLOAT32, all_to_all


@dataclass(frozen=True)
class Layer:
    """One direction of one layer, in seconds: arrays over rows, `shuffle` over groups."""

    token_wise: Floats
    shuffle: Floats
    attention: Floats
    """Computing alone."""
    exchanged: Floats
    """Attention with its exchange."""
    nic: Floats
    """How long all-to-alls and exchange keep each row's NIC at work."""

    def group_seconds(self, rows: Rows) -> Floats:
        """Return how long each group takes."""
        return rows.most(self.token_wise) + self.shuffle + rows.most(self.exchanged)

    def part(self, rows: slice, groups: slice) -> Layer:
        """Return the layer of some rows and their groups."""
        return Layer(
            self.token_wise[rows],
            self.shuffle[groups],
            self.attention[rows],
            self.exchanged[rows],
            self.nic[rows],
        )


@dataclass(frozen=True)
class Cost:
    """A layout's prediction. Rank arrays are indexed by rank, group arrays run over all groups."""

    problem: Problem
    layout: Layout
    rows: Rows
    forward: Layer
    backward: Layer
    """Without what it computes again."""

    def of_replica(self, index: int, name: str) -> Cost:
        """Return the cost of one replica, all other ranks idle. Replicas don't touch each other."""
        part, rows, groups = self.rows.of_replica(index)
        layout = replace(self.layout, name=name, replicas=self.layout.replicas[index : index + 1])
        forward, backward = self.forward.part(rows, groups), self.backward.part(rows, groups)
        return Cost(self.problem, layout, part, forward, backward)

    @cached_property
    def step_seconds(self) -> float:
        logits = self.logits_seconds.max()
        return float(
            _step_seconds(self.problem, self.layout.accumulation, sum(self.layer_seconds), logits)
        )

    @cached_property
    def directions(self) -> tuple[Floats, Floats]:
        """Each group's seconds of one layer, forward and backward, recomputing included."""
        return _directions(self.problem, self.rows, self.forward, self.backward)

    @property
    def group_seconds(self) -> Floats:
        """One layer, forward and backward, of each group."""
        forward, backward = self.directions
        return forward + backward

    @cached_property
    def layer_seconds(self) -> tuple[float, float]:
        """One layer forward and backward, of the slowest group, of FSDP or of the fullest NIC."""
        nics = _nic_seconds(self.problem, self.rows, self.forward, self.backward)
        forward, backward, nic, nic_back = (float(each.max()) for each in (*self.directions, *nics))
        return _layer_seconds(self.problem, forward, backward, nic, nic_back)

    @cached_property
    def logits_seconds(self) -> Floats:
        """The output matrix in one pass, forward and backward, of each row."""
        return _logits_seconds(self.problem, self.rows)

    @cached_property
    def busy_seconds(self) -> Floats:
        """A rank's own computing in one step, waiting and transfers left out."""
        again = 2 if self.problem.workload.recompute == "full" else 1
        layer = again * (self.forward.token_wise + self.forward.attention)
        layer = layer + self.backward.token_wise + self.backward.attention
        one_pass = self.problem.model.layers * layer + self.logits_seconds
        busy = optimizer_seconds(self.problem)
        busy[self.rows.rank] += self.layout.accumulation * one_pass
        return busy

    @cached_property
    def memory_bytes(self) -> Floats:
        return peak_bytes(self.problem, self.rows, self.layout.exchange)

    @property
    def memory_limit(self) -> Floats:
        return self.problem.rates.memory_limit

    @property
    def fits(self) -> bool:
        return bool((self.memory_bytes <= self.memory_limit).all())

    @property
    def fullest_rank(self) -> int:
        return int(np.argmax(self.memory_bytes / self.memory_limit))


def evaluate(problem: Problem, layout: Layout, *, fluid: bool = False) -> Cost:
    """Return what `layout` costs; it may exceed memory, which `Cost.fits` tells.

    Args:
        problem: what is planned for.
        layout: any layout of its ranks, tokens and heads.
        fluid: take named documents as if their work were even along the stream. Much faster, for
            searching; without documents it changes nothing.
    """
    rows = Rows.of(problem, layout)
    sight = sight_of(problem, layout, rows, fluid=fluid)
    return Cost(problem, layout, rows, *layers_of(problem, rows, sight, layout.exchange))


def layers_of(
    problem: Problem, rows: Rows, sight: Sight, exchange: Exchange
) -> tuple[Layer, Layer]:
    """Return forward and backward of one layer, for one layout or for many side by side."""
    rates, work, rank = problem.rates, problem.work, rows.rank
    linear = work.linear_per_token * rows.tokens
    pairs = work.attention_per_pair * rows.q_heads * sight.pairs[rows.group]
    busy = Attention(
        pairs / rates.attention_forward[rank],
        Work.BACKWARD_ATTENTION * pairs / rates.attention_backward[rank],
    )
    exchanged = with_exchange(problem, rows, sight, busy, exchange)
    (shuffle, nic), (shuffle_back, nic_back) = _shuffle_seconds(problem, rows)
    return (
        Layer(
            linear / rates.gemm_forward[rank],
            shuffle,
            busy.forward,
            exchanged.forward,
            nic + exchanged.nic_forward,
        ),
        Layer(
            Work.BACKWARD_LINEAR * linear / rates.gemm_backward[rank],
            shuffle_back,
            busy.backward,
            exchanged.backward,
            nic_back + exchanged.nic_backward,
        ),
    )


def side_by_side(
    problem: Problem, rows: Rows, sight: Sight, exchange: Exchange, replicas: Ints, passes: Ints
) -> Floats:
    """Return the step's seconds of many layouts at once.

    Args:
        problem: what is planned for.
        rows: of all layouts, one after the other; a rank may stand in several.
        sight: of these rows.
        exchange: of all layouts.
        replicas: how many each layout has.
        passes: of each layout.
    """
    forward, backward = layers_of(problem, rows, sight, exchange)
    ends = np.cumsum(replicas)
    starts = np.searchsorted(rows.replica, ends - replicas)  # first group of each layout
    first, second = (
        np.maximum.reduceat(seconds, starts)
        for seconds in _directions(problem, rows, forward, backward)
    )
    nic, nic_back, logits = (
        np.maximum.reduceat(each, rows.group_starts[starts])
        for each in (
            *_nic_seconds(problem, rows, forward, backward),
            _logits_seconds(problem, rows),
        )
    )
    first, second = _layer_seconds(problem, first, second, nic, nic_back)
    return _step_seconds(problem, passes, first + second, logits)


def _directions(
    problem: Problem, rows: Rows, forward: Layer, backward: Layer
) -> tuple[Floats, Floats]:
    """Return each group's seconds of one layer, forward and backward, recomputing included."""
    first, second = forward.group_seconds(rows), backward.group_seconds(rows)
    if problem.workload.recompute == "full":
        second = second + first
    return first, second


def _nic_seconds(
    problem: Problem, rows: Rows, forward: Layer, backward: Layer
) -> tuple[Floats, Floats]:
    """Return how long each row's NIC is at work in one layer, forward and backward, with FSDP."""
    first, second = forward.nic, backward.nic
    if problem.workload.recompute == "full":
        second = second + first
    gather, reduce_scatter = (each[rows.rank] for each in nic_seconds(problem))
    return first + gather, second + gather + reduce_scatter


def _layer_seconds(
    problem: Problem, forward: Seconds, backward: Seconds, nic: Seconds, nic_back: Seconds
) -> tuple[Seconds, Seconds]:
    """Return one layer's seconds, forward and backward, beside FSDP's transfers."""
    gather, reduce_scatter = fsdp_seconds(problem)
    overlap = problem.rates.overlap
    return (
        np.maximum(np.maximum(*together(forward, gather, overlap)), nic),
        np.maximum(np.maximum(*together(backward, gather + reduce_scatter, overlap)), nic_back),
    )


def _logits_seconds(problem: Problem, rows: Rows) -> Floats:
    """Return output matrix and loss in one pass, forward and backward, of each row."""
    result: Floats = logits_seconds_per_token(problem)[rows.rank] * rows.tokens
    return result


def _step_seconds(problem: Problem, passes: Ints | int, layer: Seconds, logits: Seconds) -> Seconds:
    """Return a step's seconds from those of a layer, both directions, and of the logits."""
    one_pass = problem.model.layers * layer + logits + boundary_seconds(problem)
    result: Seconds = passes * one_pass + optimizer_seconds(problem).max()
    return result


_Shuffle = tuple[Floats, Floats]
"""Seconds of each group, and seconds that each row's NIC is at work."""


def _shuffle_seconds(problem: Problem, rows: Rows) -> tuple[_Shuffle, _Shuffle]:
    """Return the all-to-alls of one layer, forward and backward.

    Forward q, k and v go in and o comes out. Backward dO goes in with one float32 for each row,
    and dq comes out, and then dk and dv in float32.
    """
    head = problem.model.head_dim
    q, kv = rows.q_heads, 2 * rows.kv_heads
    q_k_v, nic = _moved(problem, rows, BF16 * head * (q + kv), 1)
    o, nic_out = _moved(problem, rows, BF16 * head * q, 1)
    d_o, nic_back = _moved(problem, rows, (BF16 * head + FLOAT32) * q, 1)
    d_qkv, nic_back_out = _moved(problem, rows, BF16 * head * q + FLOAT32 * head * kv, 2)
    return (q_k_v + o, nic + nic_out), (d_o + d_qkv, nic_back + nic_back_out)


def _moved(problem: Problem, rows: Rows, width: Floats, calls: int) -> _Shuffle:
    """Return what it takes each group to move `width` bytes a token by all-to-all."""
    rates, rank = problem.rates, rows.rank
    across = rows.spans_nodes[rows.group]
    latency = np.where(across, rates.across_latency[rank], rates.in_node_latency[rank])
    ports = all_to_all(rows, width)
    seconds = ports.seconds(rates, rank, rates.across_all_to_all)
    slowest = rows.most(seconds + calls * latency)
    return np.where(rows.group_sizes > 1, slowest, 0.0), ports.nic_seconds(rates, rank)
