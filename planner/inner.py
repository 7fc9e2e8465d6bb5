"""Tokens and query heads inside one head-parallel group, for the least time of its two phases.

Heads and tokens are first placed each for their own phase (`split`, exact). Two things couple them:
memory, `room >= t per_token + L (q_heads per_q_head + kv_heads per_kv_head)` at each of the memory
model's moments, and the ports of the all-to-all, whose ingress falls as t grows. So blocks of
tokens and single heads then move between ranks while that helps (`group_time`), with the memory
that is missing counted before seconds. The exchange between groups is not seen here; the evaluator
judges it.
"""

from __future__ import annotations

import numba
import numpy as np

from hexiseq_triton.planner.group_time import (
    MISSING_BYTE,
    Members,
    bytes_beside,
    group_seconds,
    kv_heads_held,
    room_for_tokens,
    shuffle_seconds,
)
from hexiseq_triton.planner.memory import BUFFERED, FIXED, PER_KV_HEAD, PER_Q_HEAD, PER_TOKEN
from hexiseq_triton.planner.rates import Ints
from hexiseq_triton.planner.speeds import (
    ATTENTION_BACKWARD,
    ATTENTION_FORWARD,
    HEADS,
    LINEAR_BACKWARD,
    LINEAR_FORWARD,
    Q_PER_KV,
    ROOM,
)
from hexiseq_triton.planner.split import place, place_tokens

_MOST_PASSES = 20
_FEW = 4
_MUCH_MOVING = 0.1
"""Where all-to-alls take this share of a layer, so few ranks may be better off with fewer of them
at work: all choices of ranks are tried."""
_HOPELESS = 1.5
"""Starts that take so many times as long as the best split are left alone."""
_SMALL = 8
"""In larger groups, of ranks that are alike in all but their place, the first one moves."""
_A_HEAD = 0
"""In place of a number of tokens: a head moves."""


@numba.njit(cache=True)
def split_group(num_tokens: int, unit: int, members: Members) -> tuple[Ints, Ints]:
    """Return tokens and query heads of each rank of a group.

    Args:
        num_tokens: of the group.
        unit: tokens come in blocks of so many, but for one remainder.
        members: the ranks.
    """
    tokens, heads = first_split(num_tokens, unit, members)
    best = _settled(tokens, heads, unit, members)
    if len(tokens) == 1 or not _hopeful(best, num_tokens, tokens, heads, members):
        return tokens, heads
    if best >= MISSING_BYTE:
        best = _try_by_room(best, tokens, heads, unit, members)
    if len(tokens) <= _FEW:
        for for_heads in range(1, 2 ** len(tokens)):
            for for_tokens in range(1, 2 ** len(tokens)):
                best = _try_on_some(best, for_heads, for_tokens, tokens, heads, unit, members)
    return tokens, heads


@numba.njit(cache=True)
def _hopeful(best: float, num_tokens: int, tokens: Ints, heads: Ints, members: Members) -> bool:
    """Return whether starting anew may help: ranks too full that have room, or few moving much."""
    if best >= MISSING_BYTE:
        return _has_room(num_tokens, members)
    if len(tokens) > _FEW:
        return False
    held = kv_heads_held(heads, int(members.shared[Q_PER_KV]))
    return sum(shuffle_seconds(tokens, heads, held, members)) > _MUCH_MOVING * best


@numba.njit(cache=True)
def _has_room(num_tokens: int, members: Members) -> bool:
    """Return whether the memory of all ranks together holds the tokens and every head once."""
    shared = members.shared
    heads = shared[HEADS]
    held = heads / shared[Q_PER_KV]
    enough = True
    for moment in members.moments:
        of_heads = heads * moment[PER_Q_HEAD] + held * moment[PER_KV_HEAD]
        needed = num_tokens * (moment[PER_TOKEN] + of_heads)
        needed += moment[BUFFERED] * held * members.buffers
        room = np.maximum(members.by_rank[:, ROOM] - moment[FIXED], 0.0).sum()
        enough &= needed <= room
    return bool(enough)


@numba.njit(cache=True)
def _try_by_room(best: float, tokens: Ints, heads: Ints, unit: int, members: Members) -> float:
    """Start anew with heads as ranks have memory rather than speed; keep what is better."""
    room = members.by_rank[:, ROOM] - members.moments[:, FIXED].max()
    seconds = 1 / np.maximum(room, 1.0)
    caps = np.full(len(heads), heads.sum(), dtype=np.int64)
    new_heads = place(heads.sum(), seconds, seconds, caps)
    new_tokens = _first_tokens(tokens.sum(), unit, new_heads, members)
    return _better(best, (new_tokens, new_heads), tokens, heads, unit, members)


@numba.njit(cache=True)
def _try_on_some(
    best: float,
    for_heads: int,
    for_tokens: int,
    tokens: Ints,
    heads: Ints,
    unit: int,
    members: Members,
) -> float:
    """Start anew with heads and tokens on the ranks whose bits are set; keep what is better.

    Starts that take much longer are not tried.
    """
    new_tokens, new_heads = np.zeros_like(tokens), np.zeros_like(heads)
    some, at = _some(for_heads, members)
    new_heads[at] = first_split(tokens.sum(), unit, some)[1]
    some, at = _some(for_tokens, members)
    new_tokens[at] = first_split(tokens.sum(), unit, some)[0]
    held = kv_heads_held(new_heads, int(members.shared[Q_PER_KV]))
    if group_seconds(new_tokens, new_heads, held, members) >= _HOPELESS * best:
        return best
    return _better(best, (new_tokens, new_heads), tokens, heads, unit, members)


@numba.njit(cache=True)
def _better(
    best: float, start: tuple[Ints, Ints], tokens: Ints, heads: Ints, unit: int, members: Members
) -> float:
    """Settle a new start, and keep it if it is better; return the least seconds."""
    new_tokens, new_heads = start
    found = _settled(new_tokens, new_heads, unit, members)
    if found < best:
        tokens[:] = new_tokens
        heads[:] = new_heads
    return min(best, found)


@numba.njit(cache=True)
def _some(bits: int, members: Members) -> tuple[Members, Ints]:
    """Return the ranks whose bits are set, and which they are."""
    at = np.array([r for r in range(len(members.node)) if bits >> r & 1])
    shared, moments, buffers = members.shared, members.moments, members.buffers
    return Members(members.by_rank[at], members.node[at], shared, moments, buffers), at


@numba.njit(cache=True)
def _settled(tokens: Ints, heads: Ints, unit: int, members: Members) -> float:
    """Move heads and tokens while that helps; return the seconds then."""
    held = kv_heads_held(heads, int(members.shared[Q_PER_KV]))
    best = group_seconds(tokens, heads, held, members)
    for _ in range(_MOST_PASSES):
        before = best
        best = _move_tokens(best, tokens, heads, unit, members)
        best = _moved_around(best, tokens, heads, _A_HEAD, unit, members)
        if best >= before * (1 - 1e-12):
            break
    return best


@numba.njit(cache=True)
def first_split(num_tokens: int, unit: int, members: Members) -> tuple[Ints, Ints]:
    """Return tokens and heads, each placed for its own phases alone and within memory."""
    heads = _first_heads(num_tokens, members)
    return _first_tokens(num_tokens, unit, heads, members), heads


@numba.njit(cache=True)
def _first_heads(num_tokens: int, members: Members) -> Ints:
    """Return heads for the attention phases alone, within what memory can hold of them."""
    by_rank, shared = members.by_rank, members.shared
    num_heads = int(shared[HEADS])
    caps = np.full(len(by_rank), num_heads, dtype=np.int64)
    for moment in members.moments:
        head = num_tokens * (moment[PER_Q_HEAD] + moment[PER_KV_HEAD] / shared[Q_PER_KV])
        for r in range(len(caps)):
            room = by_rank[r, ROOM] - moment[FIXED]
            caps[r] = min(caps[r], max(0, int(room / max(head, 1.0))))
    forward = by_rank[:, ATTENTION_FORWARD].copy()
    backward = by_rank[:, ATTENTION_BACKWARD].copy()
    heads = place(num_heads, forward, backward, caps)
    if heads[0] < 0:
        heads = place(num_heads, forward, backward, np.full(len(caps), num_heads, dtype=np.int64))
    return heads


@numba.njit(cache=True)
def _first_tokens(num_tokens: int, unit: int, heads: Ints, members: Members) -> Ints:
    """Return tokens for the token-wise phases alone, in what memory the heads leave."""
    by_rank, shared = members.by_rank, members.shared
    held = kv_heads_held(heads, int(shared[Q_PER_KV]))
    caps = np.zeros(len(heads), dtype=np.int64)
    room = by_rank[:, ROOM] - bytes_beside(num_tokens, heads, held, members)
    for r in range(len(heads)):
        most = room_for_tokens(room[r], num_tokens, heads[r], held[r], members)
        caps[r] = min(num_tokens, max(0, int(most)))
    forward = by_rank[:, LINEAR_FORWARD].copy()
    backward = by_rank[:, LINEAR_BACKWARD].copy()
    tokens = place_tokens(num_tokens, forward, backward, caps, unit)
    if tokens[0] < 0:
        free = np.full(len(caps), num_tokens, dtype=np.int64)
        tokens = place_tokens(num_tokens, forward, backward, free, unit)
    return tokens


# -------------------------------------------------------------------- moves


@numba.njit(cache=True)
def _move_tokens(best: float, tokens: Ints, heads: Ints, unit: int, members: Members) -> float:
    """Move blocks of tokens between ranks, large ones first, while that helps."""
    step = max(unit, tokens.sum() // 32 // unit * unit)
    while True:
        best = _moved_around(best, tokens, heads, step, unit, members)
        if step == unit:
            break
        step = max(unit, step // 2 // unit * unit)
    if len(tokens) <= _FEW:
        best = _move_tokens_of_three(best, tokens, heads, unit, members)
    return best


@numba.njit(cache=True)
def _moved_around(
    best: float, tokens: Ints, heads: Ints, step: int, unit: int, members: Members
) -> float:
    """Move `step` tokens, or a head, from each rank to each other where that helps."""
    for giver in range(len(tokens)):
        if _stands_for_another(giver, tokens, heads, members):
            continue
        for taker in range(len(tokens)):
            if giver == taker or _stands_for_another(taker, tokens, heads, members):
                continue
            if step == _A_HEAD:
                best = _head_moved(best, tokens, heads, giver, taker, unit, members)
            else:
                best = _tokens_moved(best, tokens, heads, giver, taker, step, members)
    return best


@numba.njit(cache=True)
def _stands_for_another(rank: int, tokens: Ints, heads: Ints, members: Members) -> bool:
    """Return whether, in a large group, an earlier rank is alike and holds the same."""
    if len(tokens) <= _SMALL:
        return False
    by_rank = members.by_rank
    for r in range(rank):
        if tokens[r] == tokens[rank] and heads[r] == heads[rank]:
            same = True
            for column in range(by_rank.shape[1]):
                same &= by_rank[r, column] == by_rank[rank, column]
            if same:
                return True
    return False


@numba.njit(cache=True)
def _tokens_moved(
    best: float, tokens: Ints, heads: Ints, giver: int, taker: int, step: int, members: Members
) -> float:
    """Move tokens from one rank to another if that helps."""
    if tokens[giver] < step:
        return best
    tokens[giver] -= step
    tokens[taker] += step
    held = kv_heads_held(heads, int(members.shared[Q_PER_KV]))
    found = group_seconds(tokens, heads, held, members)
    if found < best:
        return found
    tokens[giver] += step
    tokens[taker] -= step
    return best


@numba.njit(cache=True)
def _head_moved(
    best: float, tokens: Ints, heads: Ints, giver: int, taker: int, unit: int, members: Members
) -> float:
    """Move a head from one rank to another if that helps.

    Tokens stay, are placed anew, or as many as go with a head go with it.
    """
    num_tokens, num_heads = tokens.sum(), max(1, heads.sum())
    if not heads[giver]:
        return best
    heads[giver] -= 1
    heads[taker] += 1
    held = kv_heads_held(heads, int(members.shared[Q_PER_KV]))
    together = min(tokens[giver], max(unit, num_tokens // num_heads // unit * unit))
    chosen, helped = tokens, False
    for way in range(3):
        placed = tokens.copy()
        if way == 1:
            placed = _first_tokens(num_tokens, unit, heads, members)
        elif way == 2:
            placed[giver] -= together
            placed[taker] += together
        found = group_seconds(placed, heads, held, members)
        if found < best:
            best, chosen, helped = found, placed, True
    if helped:
        tokens[:] = chosen
    else:
        heads[giver] += 1
        heads[taker] -= 1
    return best


@numba.njit(cache=True)
def _move_tokens_of_three(
    best: float, tokens: Ints, heads: Ints, unit: int, members: Members
) -> float:
    """Move two blocks of one rank to two others, or one block each of two to one."""
    held = kv_heads_held(heads, int(members.shared[Q_PER_KV]))
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
                    found = group_seconds(tokens, heads, held, members)
                    if found < best:
                        best = found
                    else:
                        tokens[one] += 2 * step
                        tokens[two] -= step
                        tokens[three] -= step
    return best
