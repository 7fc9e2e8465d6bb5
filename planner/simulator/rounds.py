"""The rounds of the runtime's exchange, for counts of tokens: who sends what to whom in which.

They are those of `schedule.transfers`: what ranks need within the same `window` chunks of time. Of
one round a rank sends to two others at a time, and receives from two, as NCCL takes its peers in
turns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from hexiseq_triton.planner.plans import ExchangePlan
from hexiseq_triton.planner.rates import Floats, Ints
from hexiseq_triton.planner.schedule import (
    CLOSE,
    num_pieces,
    others_turn,
    piece_edges,
    radical_inverse,
)
from hexiseq_triton.planner.simulator.replicas import ReplicaView

_AT_A_TIME = 2
"""Transfers that a rank sends at once, and that it receives at once; assumed."""
_MOST_TRANSFERS = 1 << 16
"""Of one layer; where there are more, longer chunks are simulated, so that graphs stay small."""


@dataclass(frozen=True)
class Rounds:
    """Transfers in their order, and what rows do besides.

    Attributes:
        at: the round of each transfer, from 1.
        sender: the entry that it comes from.
        receiver: the entry that it goes to.
        tokens: what it carries.
        ends: [2, transfers], the rows of sender and receiver.
        before: [2, transfers], which transfer of its round has to be over at each end; -1 is none.
        last: [rounds + 3, rows, 4], the last transfers of each round that a row sends, and that it
            receives; -1 is none, as in round 0 and in two after the last, or before the first.
        own: [rounds + 2, rows], what part of its own keys a row works on in backward: before the
            rounds, after each, and at the end.
        room: [rounds + 1, rows], which round has to be worked on before a row's keys come; 0 is
            none.
    """

    at: Ints
    sender: Ints
    receiver: Ints
    tokens: Floats
    ends: Ints
    before: Ints
    last: Ints
    own: Floats
    room: Ints

    @property
    def count(self) -> int:
        return int(self.at.max(initial=0))


def rounds_of(view: ReplicaView, exchange: ExchangePlan, spread: bool) -> Rounds:
    """Return the transfers of one attention layer, and where own keys are worked on.

    Args:
        view: the replica.
        exchange: chunks and window.
        spread: whether the order is "spread".
    """
    by_rank = np.argsort(view.rank, kind="stable")
    chunk_tokens, need, sender, receiver, tokens = _needed(
        by_rank,
        view.group,
        view.tokens,
        np.diag(view.share),
        view.fetched,
        view.entry_starts,
        view.servers,
        exchange.chunk_tokens,
        spread,
    )
    chunks = (need - need.min(initial=np.inf)) / chunk_tokens
    at = (chunks + CLOSE).astype(np.int64) // exchange.window + 1
    ends = view.entry_row[np.stack([sender, receiver])]
    order = _in_turns(np.argsort(need, kind="stable"), at, ends, len(view.rank))
    at, ends = at[order], np.take(ends, order, axis=1)
    arrives = np.zeros((int(at.max(initial=0)) + 1, len(view.rank)), dtype=np.bool_)
    arrives[at, ends[1]] = True
    heads = np.diff(view.kv_ranges, axis=1)[:, 0]
    round_tokens = exchange.window * chunk_tokens
    own = _own_shares(arrives, heads, view.tokens[view.group], round_tokens)
    waits = _one_after_another(at, ends, len(view.rank))
    moved = at, sender[order], receiver[order], tokens[order], ends
    return Rounds(*moved, *waits, own, _rooms(arrives))


_others_turn = numba.njit(cache=True)(others_turn)
_num_pieces = numba.njit(cache=True)(num_pieces)
_piece_edges = numba.njit(cache=True)(piece_edges)
_radical_inverse = numba.njit(cache=True)(radical_inverse)


@numba.njit(cache=True)
def _pieces(
    here: int,
    group_tokens: Floats,
    own_share: Floats,
    fetched: Floats,
    chunk_tokens: int,
    spread: bool,
) -> Floats:
    """Return when a group needs what: time, source group, tokens; as `schedule` has it."""
    groups = len(group_tokens)
    ahead = 0.0
    for source in range(groups):
        ahead += group_tokens[source] if source != here and fetched[here, source] > 0 else 0.0
    start, length = _others_turn(group_tokens.sum(), ahead, own_share[here])
    found, turn = [(0.0, 0.0, 0.0) for _ in range(0)], 0
    for step in range(1, groups):
        source = (here - step) % groups
        total = fetched[here, source]
        if total == 0:
            continue
        lasts = length if spread else length * group_tokens[source] / ahead
        pieces = _num_pieces(total, lasts, chunk_tokens, spread)
        phase = _radical_inverse(turn) if spread else 0.0
        last = 0.0
        edges = _piece_edges(int(np.ceil(total)), pieces, chunk_tokens)
        for i in range(pieces):
            edge = min(total, float(edges[i]))
            found.append((start + lasts * (i + phase) / pieces, float(source), edge - last))
            last = edge
        start += 0.0 if spread else lasts
        turn += 1
    return np.array(found) if found else np.zeros((0, 3))


@numba.njit(cache=True)
def _needed(
    rows: Ints,
    group: Ints,
    group_tokens: Floats,
    own_share: Floats,
    fetched: Floats,
    entry_starts: Ints,
    servers: Ints,
    chunk_tokens: int,
    spread: bool,
) -> tuple[int, Floats, Ints, Ints, Floats]:
    """Return tokens of a chunk, when each piece is needed, entries of its ends, and its tokens.

    Pieces come row after row. Chunks are doubled until there are few enough.
    """
    while True:
        of_group = [
            _pieces(g, group_tokens, own_share, fetched, chunk_tokens, spread)
            for g in range(len(group_tokens))
        ]
        total = 0
        for row in rows:
            total += len(of_group[group[row]]) * (entry_starts[row + 1] - entry_starts[row])
        if total <= _MOST_TRANSFERS or chunk_tokens > group_tokens.sum():
            break
        chunk_tokens *= 2
    need, tokens = np.empty(total), np.empty(total)
    sender, receiver = np.empty(total, dtype=np.int64), np.empty(total, dtype=np.int64)
    found = 0
    for row in rows:
        pieces = of_group[group[row]]
        for i in range(len(pieces)):
            for entry in range(entry_starts[row], entry_starts[row + 1]):
                need[found], tokens[found] = pieces[i, 0], pieces[i, 2]
                sender[found], receiver[found] = servers[int(pieces[i, 1]), entry], entry
                found += 1
    return chunk_tokens, need, sender, receiver, tokens


@numba.njit(cache=True)
def _in_turns(order: Ints, at: Ints, ends: Ints, rows: int) -> Ints:
    """Return the order in each round by turn: the first in which both ends are free."""
    count, begin = len(order), 0
    found, turns = np.empty_like(order), np.empty_like(order)
    while begin < count:
        end = begin
        while end < count and at[order[end]] == at[order[begin]]:
            end += 1
        busy = np.zeros((2, rows, end - begin), dtype=np.bool_)
        taken = np.zeros(end - begin + 1, dtype=np.int64)
        for i in range(begin, end):
            turn, sender, receiver = 0, ends[0, order[i]], ends[1, order[i]]
            while busy[0, sender, turn] or busy[1, receiver, turn]:
                turn += 1
            busy[0, sender, turn] = busy[1, receiver, turn] = True
            turns[i] = turn
            taken[turn + 1] += 1
        places = begin + np.cumsum(taken)
        for i in range(begin, end):
            found[places[turns[i]]] = order[i]
            places[turns[i]] += 1
        begin = end
    return found


@numba.njit(cache=True)
def _one_after_another(at: Ints, ends: Ints, rows: int) -> tuple[Ints, Ints]:
    """Return `before` and `last` of transfers in their order."""
    before = np.full((2, len(at)), -1)
    last = np.full((at[-1] + 3 if len(at) else 3, rows, 2 * _AT_A_TIME), -1)
    for i in range(len(at)):
        for end in range(2):
            under_way, first = last[at[i], ends[end, i]], end * _AT_A_TIME
            before[end, i] = under_way[first]
            for place in range(first, first + _AT_A_TIME - 1):
                under_way[place] = under_way[place + 1]
            under_way[first + _AT_A_TIME - 1] = i
    return before, last


@numba.njit(cache=True)
def _own_shares(
    arrives: NDArray[np.bool_], heads: Ints, group_tokens: Floats, round_tokens: int
) -> Floats:
    """Return what part of its own keys each row works on when, in whole heads.

    As `ring.own_shares` does.
    """
    rounds, rows = arrives.shape
    shares = np.zeros((rounds + 1, rows))
    for row in range(rows):
        if heads[row] == 0:
            shares[0, row] = 1.0
            continue
        empty = rounds - 1 - arrives[1:, row].sum()
        share = heads[row] * round_tokens / max(1.0, group_tokens[row])
        share = min(share, max(0, heads[row] - 1) / max(1, empty))
        done = (heads[row] - share * empty) / 2
        before = round(done + 0.25)
        shares[0, row] = before / heads[row]
        for at in range(1, rounds):
            done += 0.0 if arrives[at, row] else share
            now = max(before, round(done + 0.25))
            shares[at, row] = (now - before) / heads[row]
            before = now
        shares[rounds, row] = 1 - before / heads[row]
    return shares


@numba.njit(cache=True)
def _rooms(arrives: NDArray[np.bool_]) -> Ints:
    """Return the last round but one that arrived before each that arrives; 0 for none."""
    rooms = np.zeros(arrives.shape, dtype=np.int64)
    for row in range(arrives.shape[1]):
        last, before = 0, 0
        for at in range(1, len(arrives)):
            if arrives[at, row]:
                rooms[at, row] = before
                last, before = at, last
    return rooms
