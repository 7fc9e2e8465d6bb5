"""What one layer costs every rank, as the search sees it: seconds a token, a head, a byte.

Forward counts as often as it runs: twice where it is recomputed in backward. Ranks that are alike
in everything here, and stand in nodes that are alike, are of one *kind*; the search solves a group
once for its kinds, however many groups there are of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hexiseq_triton.planner.fsdp import fsdp_seconds
from hexiseq_triton.planner.logits import logits_seconds_per_token
from hexiseq_triton.planner.memory import memory_model
from hexiseq_triton.planner.problem import Problem, Work
from hexiseq_triton.planner.rates import Floats, Ints

LINEAR_FORWARD, LINEAR_BACKWARD, ATTENTION_FORWARD, ATTENTION_BACKWARD = range(4)
IN_NODE, ACROSS, IN_NODE_LATENCY, ACROSS_LATENCY, SHARES_PORT, ROOM, EXCHANGE_ACROSS = range(4, 11)
LAYER_FORWARD = 11
"""Columns of `Speeds.by_rank`."""

HEADS, Q_PER_KV, HEAD_DIM, FORWARDS, GATHER, REDUCE = range(6)
COMPUTE_SLOWDOWN, TRANSFER_SLOWDOWN, BUFFER, BLOCK, COMMUNICATOR = range(6, 11)
PEER_Q_HEAD, PEER_KV_HEAD, PEER_SHARED_KV_HEAD, PEER_FIXED = range(11, 15)
"""Entries of `Speeds.shared`. GATHER and REDUCE are FSDP's seconds beside a layer's forward and
backward, and the slowdowns are those of `Overlap`."""


@dataclass(frozen=True)
class Speeds:
    """The search's view of a problem.

    `by_rank` is [ranks, 12]: seconds a token in the token-wise phases, forward with the logits, and
    backward; seconds a head and group token in attention, forward and backward; seconds a byte in
    an all-to-all, in the node and across; the two latencies; 1 if both share a port; bytes of
    memory; seconds a byte of the exchange across nodes; seconds a token in one forward pass of the
    layer alone. `shared` holds what is alike for all ranks, `moments` is the memory model's, `kind`
    [ranks] numbers the kinds, `node` [ranks] the nodes.
    """

    by_rank: Floats
    shared: Floats
    moments: Floats
    kind: Ints
    node: Ints

    @classmethod
    def of(cls, problem: Problem) -> Speeds:
        rates, work, memory = problem.rates, problem.work, memory_model(problem)
        model, workload = problem.model, problem.workload
        times = 2 if workload.recompute == "full" else 1
        logits = logits_seconds_per_token(problem) / model.layers
        linear = work.linear_per_token / rates.gemm_forward
        gather, reduce_scatter = fsdp_seconds(problem)
        pairs = work.attention_per_pair * workload.pairs_per_token
        by_rank = np.stack(
            [
                times * linear + logits,
                Work.BACKWARD_LINEAR * work.linear_per_token / rates.gemm_backward,
                times * pairs / rates.attention_forward,
                Work.BACKWARD_ATTENTION * pairs / rates.attention_backward,
                1 / rates.in_node,
                1 / rates.across_all_to_all,
                rates.in_node_latency,
                rates.across_latency,
                rates.shares_port.astype(float),
                rates.memory_limit,
                1 / rates.across,
                linear,
            ],
            axis=1,
        )
        shared = np.array(
            [
                model.heads,
                model.heads // model.kv_heads,
                model.head_dim,
                times,
                gather,
                gather + reduce_scatter,
                rates.overlap.compute_slowdown,
                rates.overlap.transfer_slowdown,
                memory.buffer_per_kv_head,
                memory.block_per_kv_head,
                memory.communicator,
                memory.peer_per_q_head,
                memory.peer_per_kv_head,
                memory.peer_per_shared_kv_head,
                memory.peer_fixed,
            ]
        )
        return cls(by_rank, shared, memory.moments, _kinds(by_rank, rates.node), rates.node)


def _kinds(by_rank: Floats, node: Ints) -> Ints:
    """Number the ranks that are alike and whose nodes hold the same ranks."""
    _, alike = np.unique(by_rank, axis=0, return_inverse=True)
    order = np.lexsort((alike, node))
    starts = np.flatnonzero(np.diff(node[order], prepend=-1))
    number: dict[tuple[int, ...], int] = {}
    node_kind = np.zeros(int(node.max()) + 1, dtype=np.int64)
    for members in np.split(order, starts[1:]):
        make = tuple(alike[members].tolist())
        node_kind[node[members[0]]] = number.setdefault(make, len(number))
    pairs = np.stack([node_kind[node], alike], axis=1)
    _, kind = np.unique(pairs, axis=0, return_inverse=True)
    result: Ints = kind.astype(np.int64)
    return result
