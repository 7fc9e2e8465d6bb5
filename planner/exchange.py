"""Attention together with the exchange of keys and values between groups, in seconds of each rank.

"routes", the runtime's exchange: every rank fetches straight from the owners, works on its own
tokens first, and then on batches of `window` rounds, one while the next is in flight. The longest
path through n batches, evenly spaced, ends at

    max( all computing,  first batch's arrival + computing on all of them,
                         last batch's arrival + computing on it )

Backward fetches again and answers each batch by its dK and dV; the last answer is exposed.

The others are what some baselines do and the runtime does not. Their blocks are equal, so that each
step is as long as its slowest rank or link:

    rotation      blocks go round a ring of all groups, neighbour to neighbour
    double_ring   rings inside windows of groups, and a ring of windows that hides behind them
    all_gather    all keys and values are gathered before attention, and dK, dV reduced after it
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hexiseq_triton.planner.overlap import Overlap
from hexiseq_triton.planner.plans import Exchange
from hexiseq_triton.planner.problem import Problem
from hexiseq_triton.planner.rates import Floats, Ints, together
from hexiseq_triton.planner.rows import Rows, sums_by
from hexiseq_triton.planner.sight import Sight
from hexiseq_triton.planner.traffic import BF16, FLOAT32, Ports, intervals_held, kv_exchange

ANSWER = FLOAT32 / BF16
"""Bytes of dK and dV for each byte of K and V."""


class Attention(NamedTuple):
    """Seconds of attention in one layer, for each row."""

    forward: Floats
    backward: Floats
    nic_forward: Floats | float = 0.0
    """Seconds that the exchange keeps each row's NIC at work; counted for "routes" alone."""
    nic_backward: Floats | float = 0.0


def with_exchange(
    problem: Problem, rows: Rows, sight: Sight, busy: Attention, exchange: Exchange
) -> Attention:
    """Return how long attention takes with an exchange; `busy` is computing alone."""
    if not rows.exchanges.any():
        return busy
    if exchange == "routes":
        return _routes(problem, rows, sight, busy)
    if exchange == "all_gather":
        return _all_gather(problem, rows, busy)
    return _rings(problem, rows, busy, nested=exchange == "double_ring")


# -------------------------------------------------------------------- the runtime's


def _routes(problem: Problem, rows: Rows, sight: Sight, busy: Attention) -> Attention:
    overlap = problem.rates.overlap
    slowed = 1 + overlap.attention_slowdown * rows.exchanges
    fetch = kv_exchange(problem, rows, sight.fetches)
    intervals = intervals_held(rows)
    arrivals, departures = (
        transfers[rows.group] * intervals
        for transfers in sight.fetches.chunks(problem.exchange.chunk_tokens)
    )
    batches = np.ceil(np.maximum(arrivals, departures) / problem.exchange.window)
    count = np.maximum(batches, 1.0)
    waits = (arrivals > 0) * (1 - rows.share_of_replica[rows.group])

    answered = fetch.with_returns(ANSWER)
    forward = _moving(problem, rows, fetch, arrivals)
    backward = _moving(problem, rows, answered, arrivals)
    last_answer = (backward - forward) / count
    return Attention(
        _longest_path(slowed * busy.forward, forward, waits, count, overlap),
        _longest_path(slowed * busy.backward, backward, waits, count, overlap) + last_answer,
        fetch.nic_seconds(problem.rates, rows.rank),
        answered.nic_seconds(problem.rates, rows.rank),
    )


def _moving(problem: Problem, rows: Rows, ports: Ports, arrivals: Floats) -> Floats:
    """Return seconds of all transfers of a rank, `window` of them in flight."""
    rates = problem.rates
    far = ports.in_across + ports.out_across > 0
    latency = np.where(far, rates.across_latency[rows.rank], rates.in_node_latency[rows.rank])
    seconds = ports.seconds(rates, rows.rank, rates.across)
    result: Floats = seconds + latency * arrivals / problem.exchange.window
    return result


def _longest_path(
    busy: Floats, moving: Floats, waits: Floats, count: Floats, overlap: Overlap
) -> Floats:
    """Return the longest path through `count` batches.

    `waits` is the share of computing that needs what arrives.
    """
    computing, moving = together(busy, moving, overlap)
    after_first = moving / count + waits * computing
    after_last = moving + waits * computing / count
    result: Floats = np.maximum(computing, np.maximum(after_first, after_last))
    return result


# -------------------------------------------------------------------- baselines'


def _rings(problem: Problem, rows: Rows, busy: Attention, *, nested: bool) -> Attention:
    """Return attention with equal blocks going round, in one ring or in two nested ones."""
    overlap = problem.rates.overlap
    count = np.bincount(rows.replica)
    hop = _hop_seconds(problem, rows, 1, count)
    windows = range(1, int(count.max()) if nested else 1)
    dividing = [window for window in windows if (count % window == 0).any()]
    hops = {
        window: (
            _hop_seconds(problem, rows, 1, np.full_like(count, window)),
            _hop_seconds(problem, rows, window, count),
        )
        for window in dividing
    }
    seconds = []
    for computing, share in ((busy.forward, 1.0), (busy.backward, 1.0 + ANSWER)):
        step = np.maximum.reduceat(computing, rows.replica_starts) / count
        best = _windowed(step, share * hop, share * hop, count, count, overlap)
        for window, (near, far) in hops.items():
            found = _windowed(step, share * near, share * far, count, window, overlap)
            best = np.where(count % window == 0, np.minimum(best, found), best)
        seconds.append(best)
    forward, backward = seconds
    # each block's dK and dV make one more hop, home
    backward = backward + np.where(count > 1, ANSWER * hop, 0.0)
    replica = rows.replica[rows.group]
    return Attention(forward[replica], backward[replica])


def _windowed(
    step: Floats,
    hop: Floats,
    far_hop: Floats,
    count: Ints,
    window: Ints | int,
    overlap: Overlap,
) -> Floats:
    """Return seconds of `count` steps in windows; a window's last step starts no inner hop."""
    inner = (window - 1) * np.maximum(*together(step, hop, overlap)) + step
    result: Floats = (count // window - 1) * np.maximum(*together(inner, far_hop, overlap)) + inner
    return result


def _hop_seconds(problem: Problem, rows: Rows, distance: int, ring: Ints) -> Floats:
    """Return, for each replica, the slowest hop of a block to the group `distance` groups on.

    `ring` is how many groups in a row make a ring, for each replica; the last one's next is the
    first. Where a replica's groups don't divide into such rings, the result means nothing.
    """
    rates, rank = problem.rates, rows.rank
    replica, size = rows.replica[rows.group], rows.group_sizes[rows.group]
    at = np.arange(len(rank)) - rows.replica_starts[replica]
    length = ring[replica] * size
    on = at // length * length + (at % length + distance * size) % length
    to = rank[np.minimum(rows.replica_starts[replica] + on, len(rank) - 1)]
    near = rates.node[rank] == rates.node[to]
    rate = np.where(
        near,
        np.minimum(rates.in_node[rank], rates.in_node[to]),
        np.minimum(rates.across[rank], rates.across[to]),
    )
    latency = np.where(near, rates.in_node_latency[rank], rates.across_latency[rank])
    block = 2 * BF16 * problem.model.head_dim * rows.group_tokens[rows.group] * rows.kv_heads
    result: Floats = np.maximum.reduceat(block / rate + latency, rows.replica_starts)
    return result


def _all_gather(problem: Problem, rows: Rows, busy: Attention) -> Attention:
    """Return attention after a ring all-gather; a node's NICs share what comes from outside.

    Groups are of one rank each.
    """
    rates = problem.rates
    replica = rows.replica[rows.group]
    nodes = int(rows.node.max()) + 1
    here = replica * nodes + rows.node
    block = 2 * BF16 * problem.model.head_dim * rows.tokens * rows.kv_heads
    near, ranks = sums_by(here, block)[here], np.bincount(here)[here]
    everything = sums_by(replica, block)[replica]
    seconds = np.maximum(
        (everything - block) / rates.in_node[rows.rank] * (ranks > 1),
        (everything - near) / ranks / rates.across[rows.rank],
    )
    crosses = everything > near
    seconds += np.where(crosses, rates.across_latency[rows.rank], rates.in_node_latency[rows.rank])
    gather = np.maximum.reduceat(seconds, rows.replica_starts)[replica] * rows.exchanges
    return Attention(busy.forward + gather, busy.backward + (1 + ANSWER) * gather)
