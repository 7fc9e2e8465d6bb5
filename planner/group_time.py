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

from hexiseq_triton.planner.memory import BUFFERED, FIXED, PER_KV_HEAD, PER_Q_HEAD, PER_TOKEN
from hexiseq_triton.planner.rates import Floats, Ints
from hexiseq_triton.planner.speeds import (
    ACROSS,
    ACROSS_LATENCY,
    ATTENTION_BACKWARD,
    ATTENTION_FORWARD,
    BLOCK,
    COMMUNICATOR,
    COMPUTE_SLOWDOWN,
    FORWARDS,
    GATHER,
    HEAD_DIM,
    HEADS,
    IN_NODE,
    IN_NODE_LATENCY,
    LAYER_FORWARD,
    LINEAR_BACKWARD,
    LINEAR_FORWARD,
    PEER_FIXED,
    PEER_KV_HEAD,
    PEER_Q_HEAD,
    PEER_SHARED_KV_HEAD,
    Q_PER_KV,
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
    moments: Floats
    """`Speeds.moments`."""
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
def room_for_tokens(room: float, num_tokens: int, heads: int, held: int, members: Members) -> float:
    """Return how many tokens a rank's memory holds beside its heads, which come first.

    Args:
        room: bytes for tokens and heads.
        num_tokens: of the group.
        heads: query heads of the rank.
        held: KV heads that they read.
        members: the ranks.
    """
    most = np.inf
    for moment in members.moments:
        left = room - moment[FIXED] - moment[BUFFERED] * held * members.buffers
        left -= num_tokens * (heads * moment[PER_Q_HEAD] + held * moment[PER_KV_HEAD])
        if moment[PER_TOKEN] > 0:
            most = min(most, left / moment[PER_TOKEN])
        elif left < 0:
            most = min(most, left)
    return most


@numba.njit(cache=True)
def bytes_beside(num_tokens: int, heads: Ints, held: Ints, members: Members) -> Floats:
    """Return what each rank's communicators take, and what its peers reach."""
    shared = members.shared
    used = np.zeros(len(heads))
    if members.buffers > 0:
        used += shared[COMMUNICATOR] + 2 * shared[PEER_FIXED] + held * num_tokens * shared[BLOCK]
    if len(heads) > 1:
        used += shared[COMMUNICATOR]
        if not _spans(members.node):
            share_kv = held.sum() * shared[Q_PER_KV] > shared[HEADS]
            kv_head = shared[PEER_SHARED_KV_HEAD if share_kv else PEER_KV_HEAD]
            widest = heads.max() * shared[PEER_Q_HEAD] + held.max() * kv_head
            used += num_tokens * widest + shared[PEER_FIXED]
    return used


@numba.njit(cache=True)
def _peak_bytes(tokens: int, num_tokens: int, heads: int, held: int, members: Members) -> float:
    """Return what tokens and heads of a rank take at the fullest moment."""
    most = 0.0
    for moment in members.moments:
        of_heads = heads * moment[PER_Q_HEAD] + held * moment[PER_KV_HEAD]
        used = moment[FIXED] + tokens * moment[PER_TOKEN] + num_tokens * of_heads
        used += moment[BUFFERED] * held * members.buffers
        most = max(most, used)
    return most


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
    beside = bytes_beside(num_tokens, heads, held, members)
    for r in range(len(tokens)):
        used = beside[r] + _peak_bytes(tokens[r], num_tokens, heads[r], held[r], members)
        missing += max(0.0, used - by_rank[r, ROOM])
        layer = shared[FORWARDS] * by_rank[r, LAYER_FORWARD]
        logits = max(logits, tokens[r] * (by_rank[r, LINEAR_FORWARD] - layer))
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
        linear = max(linear, tokens[r] * by_rank[r, LAYER_FORWARD])
        linear_back = max(linear_back, tokens[r] * by_rank[r, LINEAR_BACKWARD])
        attention = max(attention, heads[r] * by_rank[r, ATTENTION_FORWARD])
        attention_back = max(attention_back, heads[r] * by_rank[r, ATTENTION_BACKWARD])
    forward = linear + num_tokens * attention / members.shared[FORWARDS]
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
