"""Seconds and memory of one head-parallel group, for tokens and heads tried by the thousand.

For a group of L tokens, with t tokens and h heads on a rank, forward and backward counted as often
as they run, one layer takes

    max t linear_forward + max t linear_backward
    + all-to-alls(t, h)                                       the fullest port, twice a pass
    + max h L attention_forward + max h L attention_backward

The exchange between groups is not seen here. The evaluator (`cost`) says the same of a group alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from hexiseq_triton.planner.rates import Floats, Ints
from hexiseq_triton.planner.speeds import (
    ACROSS,
    ACROSS_LATENCY,
    ATTENTION_BACKWARD,
    ATTENTION_FORWARD,
    COMPUTE_SLOWDOWN,
    FORWARDS,
    GATHER,
    HEAD_DIM,
    IN_NODE,
    IN_NODE_LATENCY,
    LAYER_SHARE,
    LINEAR_BACKWARD,
    LINEAR_FORWARD,
    PEER_FIXED,
    PEER_KV_HEAD,
    PEER_Q_HEAD,
    PER_KV_HEAD,
    PER_Q_HEAD,
    PER_TOKEN,
    REDUCE,
    ROOM,
    SHARES_PORT,
    TRANSFER_SLOWDOWN,
)
from hexiseq_triton.planner.traffic import BF16, FLOAT32

MISSING_BYTE = 1e6
"""Seconds that a missing byte of memory counts: more than any layer takes."""


class Members(NamedTuple):
    """The ranks of a group: rows of `Speeds.by_rank`, and the node of each."""

    by_rank: Floats
    node: Ints
    shared: Floats
    """`Speeds.shared`."""
    buffers: float
    """Bytes of receive buffers for each KV head; 0 if nothing is received."""


@numba.njit(cache=True)
def kv_heads_held(heads: Ints, q_per_kv: int) -> Ints:
    """Return how many KV heads each rank's run of query heads reads."""
    held = np.zeros(len(heads), dtype=np.int64)
    start = 0
    for r in range(len(heads)):
        stop = start + heads[r]
        if heads[r]:
            held[r] = (stop + q_per_kv - 1) // q_per_kv - start // q_per_kv
        start = stop
    return held


@numba.njit(cache=True)
def head_bytes(num_tokens: int, heads: int, held: int, members: Members) -> float:
    """Return what query heads and the KV heads they read take over all tokens of the group."""
    shared = members.shared
    per_token = heads * shared[PER_Q_HEAD] + held * shared[PER_KV_HEAD]
    return float(num_tokens * per_token + held * members.buffers)


@numba.njit(cache=True)
def peer_bytes(num_tokens: int, heads: int, held: int, members: Members) -> float:
    """Return what the all-to-all's buffers add where a rank has so many heads fewer than most."""
    shared = members.shared
    per_token = heads * shared[PEER_Q_HEAD] + held * shared[PEER_KV_HEAD]
    return float(num_tokens * per_token + shared[PEER_FIXED])


@numba.njit(cache=True)
def _spans(node: Ints) -> bool:
    """Return whether a group has ranks in several nodes."""
    spans = False
    for r in range(1, len(node)):
        spans |= node[r] != node[0]
    return spans


@numba.njit(cache=True)
def group_seconds(tokens: Ints, heads: Ints, held: Ints, members: Members) -> float:
    """Return seconds of one layer both ways, FSDP beside it, and of the layer's part of the logits.

    Missing memory counts much more than any time.

    Args:
        tokens: of each rank.
        heads: query heads of each rank.
        held: `kv_heads_held` of them.
        members: the ranks.
    """
    by_rank, shared = members.by_rank, members.shared
    num_tokens = tokens.sum()
    missing, logits = 0.0, 0.0
    peers = len(tokens) > 1 and not _spans(members.node)
    most, most_held = heads.max(), held.max()
    for r in range(len(tokens)):
        used = head_bytes(num_tokens, heads[r], held[r], members) + tokens[r] * shared[PER_TOKEN]
        if peers:
            used += peer_bytes(num_tokens, most - heads[r], most_held - held[r], members)
        missing += max(0.0, used - by_rank[r, ROOM])
        logits = max(logits, tokens[r] * by_rank[r, LINEAR_FORWARD])
    logits *= 1 - shared[FORWARDS] * shared[LAYER_SHARE]
    forward, backward = directions(tokens, heads, held, members)
    seconds = _beside(forward, shared[GATHER], shared) + _beside(backward, shared[REDUCE], shared)
    seconds += logits
    return float(seconds + MISSING_BYTE * missing)


@numba.njit(cache=True)
def directions(tokens: Ints, heads: Ints, held: Ints, members: Members) -> tuple[float, float]:
    """Return seconds of one layer forward and backward, recomputing included."""
    forward, backward = _computing(tokens, heads, members)
    if len(tokens) > 1:
        shuffle, shuffle_back = shuffle_seconds(tokens, heads, held, members)
        forward += shuffle
        backward += shuffle_back
    return forward, backward + (members.shared[FORWARDS] - 1) * forward


@numba.njit(cache=True)
def _computing(tokens: Ints, heads: Ints, members: Members) -> tuple[float, float]:
    """Return seconds of one layer forward and backward, each once, transfers left out."""
    by_rank, num_tokens = members.by_rank, tokens.sum()
    linear, linear_back, attention, attention_back = 0.0, 0.0, 0.0, 0.0
    for r in range(len(tokens)):
        linear = max(linear, tokens[r] * by_rank[r, LINEAR_FORWARD])
        linear_back = max(linear_back, tokens[r] * by_rank[r, LINEAR_BACKWARD])
        attention = max(attention, heads[r] * by_rank[r, ATTENTION_FORWARD])
        attention_back = max(attention_back, heads[r] * by_rank[r, ATTENTION_BACKWARD])
    forward = (
        linear * members.shared[LAYER_SHARE] + num_tokens * attention / members.shared[FORWARDS]
    )
    return forward, linear_back + num_tokens * attention_back


@numba.njit(cache=True)
def _beside(computing: float, transfer: float, shared: Floats) -> float:
    """Return how long a direction of the layer takes with FSDP's transfers beside it."""
    both = min(computing, transfer)
    slowed = computing + shared[COMPUTE_SLOWDOWN] * both
    return float(max(slowed, transfer + shared[TRANSFER_SLOWDOWN] * both))


@numba.njit(cache=True)
def shuffle_seconds(tokens: Ints, heads: Ints, held: Ints, members: Members) -> tuple[float, float]:
    """Return seconds of a layer's all-to-alls, forward and backward.

    Forward, q, k and v go in and o comes out; backward, dO with a float32 a row goes in, and dq,
    then dk and dv in float32, come out. A phase ends when the fullest port is done with it.
    """
    node = members.node
    spans = _spans(node)
    first = _first_of_node(node)
    # tokens, heads and KV heads of each rank's node, kept where its first rank stands
    near = np.zeros((len(node), 3), dtype=np.int64)
    for r in range(len(node)):
        near[first[r], 0] += tokens[r]
        near[first[r], 1] += heads[r]
        near[first[r], 2] += held[r]
    whole = near.sum(axis=0)

    row = BF16 * members.shared[HEAD_DIM]
    kv_row, gradient_row = 2 * row, 2 * FLOAT32 * members.shared[HEAD_DIM]
    q_k_v, o, d_o, gradients = 0.0, 0.0, 0.0, 0.0
    for r in range(len(node)):
        mine = tokens[r], heads[r], held[r]
        here = near[first[r]]
        q_k_v = max(q_k_v, _moving(mine, here, whole, row, kv_row, 1, r, spans, members))
        o = max(o, _moving(mine, here, whole, row, 0.0, 1, r, spans, members))
        d_o = max(d_o, _moving(mine, here, whole, row + FLOAT32, 0.0, 1, r, spans, members))
        back = _moving(mine, here, whole, row, gradient_row, 2, r, spans, members)
        gradients = max(gradients, back)
    return q_k_v + o, d_o + gradients


@numba.njit(cache=True)
def _first_of_node(node: Ints) -> Ints:
    """Return, for each rank, the first one in its node."""
    first = np.arange(len(node))
    for r in range(1, len(node)):
        for s in range(r):
            if node[s] == node[r]:
                first[r] = s
                break
    return first


@numba.njit(cache=True)
def _moving(
    mine: tuple[int, int, int],
    near: Ints,
    whole: Ints,
    q_width: float,
    kv_width: float,
    calls: int,
    r: int,
    spans: bool,
    members: Members,
) -> float:
    """Return how long rank r's fullest port takes to move a token's rows by all-to-all.

    Args:
        mine: the rank's tokens, query heads and KV heads.
        near: those of all ranks in its node.
        whole: those of the group.
        q_width: bytes of a query head's rows of one token.
        kv_width: bytes of a KV head's.
        calls: all-to-alls that share the work.
        r: the rank.
        spans: whether the group has ranks in several nodes.
        members: the ranks.
    """
    tokens, width = mine[0], mine[1] * q_width + mine[2] * kv_width
    width_near = near[1] * q_width + near[2] * kv_width
    width_all = whole[1] * q_width + whole[2] * kv_width
    out, out_far = tokens * (width_near - width), tokens * (width_all - width_near)
    into, into_far = width * (near[0] - tokens), width * (whole[0] - near[0])
    inside = max(out, into)
    if members.by_rank[r, SHARES_PORT] > 0:
        inside = max(out + out_far, into + into_far)
    seconds = max(
        inside * members.by_rank[r, IN_NODE], max(out_far, into_far) * members.by_rank[r, ACROSS]
    )
    latency = ACROSS_LATENCY if spans else IN_NODE_LATENCY
    return float(seconds + calls * members.by_rank[r, latency])
