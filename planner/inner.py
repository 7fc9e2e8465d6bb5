"""Tokens and query heads inside one head-parallel group, for the least time of its two phases.

For a group of L tokens, with t tokens and h heads on a rank, forward and backward counted as often
as they run, one layer takes

    max t linear_forward + max t linear_backward
    + all-to-alls(t, h)                                       the fullest port, twice a pass
    + max h L attention_forward + max h L attention_backward

Heads and tokens are first placed each for their own phase (`split`, exact). Two things couple them:
memory, `room >= t per_token + L (q_heads per_q_head + kv_heads per_kv_head)`, and the ports of the
all-to-all, whose ingress falls as t grows. So blocks of tokens and single heads then move between
ranks while that helps, with the memory that is missing counted before seconds. The exchange between
groups is not seen here; the evaluator judges it.
"""

from __future__ import annotations

import numba
import numpy as np

from hexiseq_triton.planner.rates import COMPUTE_SLOWDOWN, TRANSFER_SLOWDOWN, Floats, Ints
from hexiseq_triton.planner.speeds import (
    ACROSS,
    ACROSS_LATENCY,
    ATTENTION_BACKWARD,
    ATTENTION_FORWARD,
    FORWARDS,
    GATHER,
    HEAD_DIM,
    HEADS,
    IN_NODE,
    IN_NODE_LATENCY,
    LAYER_SHARE,
    LINEAR_BACKWARD,
    LINEAR_FORWARD,
    PER_KV_HEAD,
    PER_Q_HEAD,
    PER_TOKEN,
    Q_PER_KV,
    REDUCE,
    ROOM,
    SHARES_PORT,
)
from hexiseq_triton.planner.split import place, place_tokens
from hexiseq_triton.planner.traffic import BF16, FLOAT32

_MISSING_BYTE = 1e6
"""Seconds that a missing byte of memory counts: more than any layer takes."""
_MOST_PASSES = 20
_FEW = 4
_MUCH_MOVING = 0.1
"""Where all-to-alls take this share of a layer, so few ranks may be better off with fewer of them
at work: all choices of ranks are tried."""
_SMALL = 8
"""In larger groups, of ranks that are alike in all but their place, the first one moves."""


@numba.njit(cache=True)
def split_group(
    num_tokens: int, unit: int, by_rank: Floats, node: Ints, shared: Floats, buffers: float
) -> tuple[Ints, Ints]:
    """Return tokens and query heads of each rank of a group.

    Args:
        num_tokens: of the group.
        unit: tokens come in blocks of so many, but for one remainder.
        by_rank: rows of `Speeds.by_rank`.
        node: of each rank.
        shared: `Speeds.shared`.
        buffers: bytes of receive buffers for each KV head; 0 if nothing is received.
    """
    tokens, heads = first_split(num_tokens, unit, by_rank, shared, buffers)
    best = _settled(tokens, heads, unit, by_rank, node, shared, buffers)
    if 1 < len(by_rank) <= _FEW:
        moving = sum(shuffle_seconds(tokens, heads, by_rank, node, shared))
        if moving > _MUCH_MOVING * best or best >= _MISSING_BYTE:
            for for_heads in range(1, 2 ** len(by_rank)):
                for for_tokens in range(1, 2 ** len(by_rank)):
                    best = _try_on_some(
                        best,
                        for_heads,
                        for_tokens,
                        tokens,
                        heads,
                        unit,
                        by_rank,
                        node,
                        shared,
                        buffers,
                    )
    return tokens, heads


@numba.njit(cache=True)
def _try_on_some(
    best: float,
    for_heads: int,
    for_tokens: int,
    tokens: Ints,
    heads: Ints,
    unit: int,
    by_rank: Floats,
    node: Ints,
    shared: Floats,
    buffers: float,
) -> float:
    """Start anew with heads and tokens on the ranks whose bits are set; keep what is better."""
    new_tokens, new_heads = np.zeros_like(tokens), np.zeros_like(heads)
    members = np.array([r for r in range(len(by_rank)) if for_heads >> r & 1])
    new_heads[members] = first_split(tokens.sum(), unit, by_rank[members], shared, buffers)[1]
    members = np.array([r for r in range(len(by_rank)) if for_tokens >> r & 1])
    new_tokens[members] = first_split(tokens.sum(), unit, by_rank[members], shared, buffers)[0]
    found = _settled(new_tokens, new_heads, unit, by_rank, node, shared, buffers)
    if found < best:
        tokens[:] = new_tokens
        heads[:] = new_heads
    return min(best, found)


@numba.njit(cache=True)
def _settled(
    tokens: Ints,
    heads: Ints,
    unit: int,
    by_rank: Floats,
    node: Ints,
    shared: Floats,
    buffers: float,
) -> float:
    """Move heads and tokens while that helps; return the seconds then."""
    best = group_seconds(tokens, heads, by_rank, node, shared, buffers)
    for _ in range(_MOST_PASSES):
        before = best
        best = _move_tokens(best, tokens, heads, unit, by_rank, node, shared, buffers)
        best = _move_heads(best, tokens, heads, unit, by_rank, node, shared, buffers)
        if best >= before * (1 - 1e-12):
            break
    return best


@numba.njit(cache=True)
def first_split(
    num_tokens: int, unit: int, by_rank: Floats, shared: Floats, buffers: float
) -> tuple[Ints, Ints]:
    """Return tokens and heads, each placed for its own phases alone and within memory."""
    heads = _first_heads(num_tokens, by_rank, shared)
    return _first_tokens(num_tokens, unit, heads, by_rank, shared, buffers), heads


@numba.njit(cache=True)
def _first_heads(num_tokens: int, by_rank: Floats, shared: Floats) -> Ints:
    """Return heads for the attention phases alone, within what memory can hold of them."""
    num_heads = int(shared[HEADS])
    caps = np.full(len(by_rank), num_heads, dtype=np.int64)
    head = num_tokens * (shared[PER_Q_HEAD] + shared[PER_KV_HEAD] / shared[Q_PER_KV])
    for r in range(len(caps)):
        caps[r] = min(caps[r], max(0, int(by_rank[r, ROOM] / max(head, 1.0))))
    forward = by_rank[:, ATTENTION_FORWARD].copy()
    backward = by_rank[:, ATTENTION_BACKWARD].copy()
    heads = place(num_heads, forward, backward, caps)
    if heads[0] < 0:
        heads = place(num_heads, forward, backward, np.full(len(caps), num_heads, dtype=np.int64))
    return heads


@numba.njit(cache=True)
def _first_tokens(
    num_tokens: int, unit: int, heads: Ints, by_rank: Floats, shared: Floats, buffers: float
) -> Ints:
    """Return tokens for the token-wise phases alone, in what memory the heads leave."""
    used = head_bytes(num_tokens, heads, shared, buffers)
    caps = np.zeros(len(heads), dtype=np.int64)
    for r in range(len(heads)):
        caps[r] = max(0, int((by_rank[r, ROOM] - used[r]) / shared[PER_TOKEN]))
    forward = by_rank[:, LINEAR_FORWARD].copy()
    backward = by_rank[:, LINEAR_BACKWARD].copy()
    tokens = place_tokens(num_tokens, forward, backward, caps, unit)
    if tokens[0] < 0:
        room = np.full(len(caps), num_tokens, dtype=np.int64)
        tokens = place_tokens(num_tokens, forward, backward, room, unit)
    return tokens


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
def head_bytes(num_tokens: int, heads: Ints, shared: Floats, buffers: float) -> Floats:
    """Return what each rank's heads take over all tokens of the group, buffers included."""
    held = kv_heads_held(heads, int(shared[Q_PER_KV]))
    per_token = heads * shared[PER_Q_HEAD] + held * shared[PER_KV_HEAD]
    result: Floats = num_tokens * per_token + held * buffers
    return result


@numba.njit(cache=True)
def group_seconds(
    tokens: Ints, heads: Ints, by_rank: Floats, node: Ints, shared: Floats, buffers: float
) -> float:
    """Return seconds of one layer both ways, FSDP beside it, and of the layer's part of the logits.

    The exchange is left out; missing memory counts much more than any time.
    """
    used = head_bytes(tokens.sum(), heads, shared, buffers)
    missing, logits = 0.0, 0.0
    for r in range(len(tokens)):
        missing += max(0.0, used[r] + tokens[r] * shared[PER_TOKEN] - by_rank[r, ROOM])
        logits = max(logits, tokens[r] * by_rank[r, LINEAR_FORWARD])
    logits *= 1 - shared[FORWARDS] * shared[LAYER_SHARE]
    forward, backward = directions(tokens, heads, by_rank, node, shared)
    seconds = _beside(forward, shared[GATHER]) + _beside(backward, shared[REDUCE]) + logits
    return float(seconds + _MISSING_BYTE * missing)


@numba.njit(cache=True)
def directions(
    tokens: Ints, heads: Ints, by_rank: Floats, node: Ints, shared: Floats
) -> tuple[float, float]:
    """Return seconds of one layer forward and backward, recomputing included, exchange left out."""
    num_tokens, times = tokens.sum(), shared[FORWARDS]
    most = np.zeros(4)
    for r in range(len(tokens)):
        most[0] = max(most[0], tokens[r] * by_rank[r, LINEAR_FORWARD])
        most[1] = max(most[1], tokens[r] * by_rank[r, LINEAR_BACKWARD])
        most[2] = max(most[2], heads[r] * by_rank[r, ATTENTION_FORWARD])
        most[3] = max(most[3], heads[r] * by_rank[r, ATTENTION_BACKWARD])
    forward = most[0] * shared[LAYER_SHARE] + num_tokens * most[2] / times
    backward = most[1] + num_tokens * most[3]
    if len(tokens) > 1:
        shuffle, shuffle_back = shuffle_seconds(tokens, heads, by_rank, node, shared)
        forward += shuffle
        backward += shuffle_back
    return forward, backward + (times - 1) * forward


@numba.njit(cache=True)
def _beside(computing: float, transfer: float) -> float:
    """Return how long a direction of the layer takes with FSDP's transfers beside it."""
    both = min(computing, transfer)
    return max(computing + COMPUTE_SLOWDOWN * both, transfer + TRANSFER_SLOWDOWN * both)


@numba.njit(cache=True)
def shuffle_seconds(
    tokens: Ints, heads: Ints, by_rank: Floats, node: Ints, shared: Floats
) -> tuple[float, float]:
    """Return seconds of a layer's all-to-alls, forward and backward.

    Forward, q, k and v go in and o comes out; backward, dO with a float32 a row goes in, and dq,
    then dk and dv in float32, come out.
    """
    q = shared[HEAD_DIM] * heads
    kv = 2 * shared[HEAD_DIM] * kv_heads_held(heads, int(shared[Q_PER_KV]))
    forward = moving_seconds(tokens, BF16 * (q + kv), 1, by_rank, node)
    forward += moving_seconds(tokens, BF16 * q, 1, by_rank, node)
    backward = moving_seconds(tokens, BF16 * q + FLOAT32 * heads, 1, by_rank, node)
    backward += moving_seconds(tokens, BF16 * q + FLOAT32 * kv, 2, by_rank, node)
    return forward, backward


@numba.njit(cache=True)
def moving_seconds(tokens: Ints, width: Floats, calls: int, by_rank: Floats, node: Ints) -> float:
    """Return seconds in which the group moves `width` bytes a token by all-to-all."""
    spans = False
    for r in range(1, len(node)):
        spans |= node[r] != node[0]
    latency = ACROSS_LATENCY if spans else IN_NODE_LATENCY
    all_tokens, all_width = tokens.sum(), width.sum()
    seconds = 0.0
    for r in range(len(tokens)):
        near_tokens, near = all_tokens, all_width
        if spans:
            near_tokens, near = 0, 0.0
            for s in range(len(tokens)):
                if node[s] == node[r]:
                    near_tokens += tokens[s]
                    near += width[s]
        out, out_far = tokens[r] * (near - width[r]), tokens[r] * (all_width - near)
        into, into_far = width[r] * (near_tokens - tokens[r]), width[r] * (all_tokens - near_tokens)
        inside = max(out, into)
        if by_rank[r, SHARES_PORT] > 0:
            inside = max(out + out_far, into + into_far)
        moving = max(inside * by_rank[r, IN_NODE], max(out_far, into_far) * by_rank[r, ACROSS])
        seconds = max(seconds, moving + calls * by_rank[r, latency])
    return seconds


@numba.njit(cache=True)
def _stands_for_another(rank: int, tokens: Ints, heads: Ints, by_rank: Floats) -> bool:
    """Return whether, in a large group, an earlier rank is alike and holds the same."""
    if len(tokens) <= _SMALL:
        return False
    for r in range(rank):
        if tokens[r] == tokens[rank] and heads[r] == heads[rank]:
            same = True
            for column in range(by_rank.shape[1]):
                same &= by_rank[r, column] == by_rank[rank, column]
            if same:
                return True
    return False


@numba.njit(cache=True)
def _move_heads(
    best: float,
    tokens: Ints,
    heads: Ints,
    unit: int,
    by_rank: Floats,
    node: Ints,
    shared: Floats,
    buffers: float,
) -> float:
    """Move single heads between ranks while that helps.

    Tokens stay, are placed anew, or as many as go with a head go with it.
    """
    num_tokens, num_heads = tokens.sum(), max(1, heads.sum())
    helped = False
    for giver in range(len(heads)):
        if _stands_for_another(giver, tokens, heads, by_rank):
            continue
        for taker in range(len(heads)):
            if giver == taker or not heads[giver]:
                continue
            if _stands_for_another(taker, tokens, heads, by_rank):
                continue
            heads[giver] -= 1
            heads[taker] += 1
            chosen = tokens
            together = min(tokens[giver], max(unit, num_tokens // num_heads // unit * unit))
            for way in range(3):
                placed = tokens.copy()
                if way == 1:
                    placed = _first_tokens(num_tokens, unit, heads, by_rank, shared, buffers)
                elif way == 2:
                    placed[giver] -= together
                    placed[taker] += together
                found = group_seconds(placed, heads, by_rank, node, shared, buffers)
                if found < best:
                    best, chosen, helped = found, placed, True
            if helped:
                tokens[:] = chosen
                helped = False
            else:
                heads[giver] += 1
                heads[taker] -= 1
    return best


@numba.njit(cache=True)
def _move_tokens(
    best: float,
    tokens: Ints,
    heads: Ints,
    unit: int,
    by_rank: Floats,
    node: Ints,
    shared: Floats,
    buffers: float,
) -> float:
    """Move blocks of tokens between ranks, large ones first, while that helps."""
    step = max(unit, tokens.sum() // 32 // unit * unit)
    while True:
        for giver in range(len(tokens)):
            if _stands_for_another(giver, tokens, heads, by_rank):
                continue
            for taker in range(len(tokens)):
                if giver == taker or tokens[giver] < step:
                    continue
                if _stands_for_another(taker, tokens, heads, by_rank):
                    continue
                tokens[giver] -= step
                tokens[taker] += step
                found = group_seconds(tokens, heads, by_rank, node, shared, buffers)
                if found < best:
                    best = found
                else:
                    tokens[giver] += step
                    tokens[taker] -= step
        if step == unit:
            break
        step = max(unit, step // 2 // unit * unit)
    if len(tokens) <= _FEW:
        best = _move_tokens_of_three(best, tokens, heads, unit, by_rank, node, shared, buffers)
    return best


@numba.njit(cache=True)
def _move_tokens_of_three(
    best: float,
    tokens: Ints,
    heads: Ints,
    unit: int,
    by_rank: Floats,
    node: Ints,
    shared: Floats,
    buffers: float,
) -> float:
    """Move two blocks of one rank to two others, or one block each of two to one."""
    for one in range(len(tokens)):
        for two in range(len(tokens)):
            for three in range(two):
                for step in (-unit, unit):
                    if one in (two, three):
                        continue
                    if tokens[one] < 2 * step or min(tokens[two], tokens[three]) < -step:
                        continue
                    tokens[one] -= 2 * step
                    tokens[two] += step
                    tokens[three] += step
                    found = group_seconds(tokens, heads, by_rank, node, shared, buffers)
                    if found < best:
                        best = found
                    else:
                        tokens[one] += 2 * step
                        tokens[two] -= step
                        tokens[three] -= step
    return best
