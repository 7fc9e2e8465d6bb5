"""The runtime's exchange: each chunk straight from its owner to who needs it, in rounds.

As the runtime does (`ring`, `exchange`), a rank takes its transfers in one order: keys of rounds 1
and 2, then after the work on round r the gradients of its keys, on their way home, and the keys of
round r + 2. A transfer begins once both of its ends are there, keys also once there is room: two
rounds that arrive take turns. In backward own keys fill rounds in which nothing arrives; of the
rest half comes first and half last.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numba
import numpy as np

from hexiseq_triton.planner.rates import Floats, Ints
from hexiseq_triton.planner.simulator.attention import Attention, Hops
from hexiseq_triton.planner.simulator.links import Links, Narrow
from hexiseq_triton.planner.simulator.replicas import ReplicaView
from hexiseq_triton.planner.simulator.rounds import Rounds


@dataclass(frozen=True)
class Direct:
    """One replica's exchange; its passes share what depends on the layout alone.

    They are steps of round after round. Round 0 is of own keys, and in backward the last one too.
    """

    links: Links
    view: ReplicaView
    rounds: Rounds

    def add(self, attention: Attention) -> Ints:
        """Add one direction of attention; return what its rows wait for at the end."""
        rounds, returns = self.rounds, [self.keys.returned] if attention.backward else []
        slowed = attention.slowed(self.keys, *returns)
        steps = rounds.count + (2 if attention.backward else 1)
        moved = rounds.at, rounds.ends, rounds.before, rounds.last, rounds.room
        ops, back, computing, *waits = _operations(
            *moved, attention.begin, attention.builder.count, steps, attention.backward
        )
        attention.builder.take_in_order(*waits)
        attention.compute(computing[:-1], slowed, self._shares(steps, attention.backward))
        attention.move(ops, slowed, self.keys)
        for hops in returns:
            attention.move(back, slowed, hops, gradients=True)
        done: Ints = computing[-1]
        return done

    @cached_property
    def keys(self) -> Hops:
        view, rounds = self.view, self.rounds
        num_bytes = view.bytes_per_token * view.entry_heads[rounds.receiver] * rounds.tokens
        return Hops.between(self.links, view, (rounds.ends[0], rounds.ends[1]), num_bytes)

    @cached_property
    def _parts(self) -> Floats:
        """What part of its receiver's attention each transfer's keys are."""
        view, rounds = self.view, self.rounds
        sender, receiver = rounds.ends
        pair = view.group[receiver], view.group[sender]
        of_heads = view.entry_heads[rounds.receiver] / np.diff(view.kv_ranges, axis=1)[receiver, 0]
        result: Floats = view.share[pair] * of_heads * rounds.tokens / view.fetched[pair]
        return result

    def _shares(self, steps: int, backward: bool) -> Floats:
        """Return [steps, rows], what part of a row's attention each round is."""
        own = np.diag(self.view.share)[self.view.group]
        share = np.zeros((steps, len(own)))
        share[0] = own
        if backward:
            share[:] = own * self.rounds.own
        _add_parts(share, self.rounds.at, self.rounds.ends[1], self._parts)
        return share


@numba.njit(cache=True)
def _add_parts(share: Floats, at: Ints, row: Ints, parts: Floats) -> None:
    for i in range(len(at)):
        share[at[i], row[i]] += parts[i]


@numba.njit(cache=True)
def _operations(
    at: Ints,
    ends: Ints,
    before: Ints,
    last: Ints,
    room: Ints,
    begin: Ints,
    first: int,
    steps: int,
    backward: bool,
) -> tuple[Ints, Ints, Ints, Narrow, Narrow]:
    """Return numbers from `first` for transfers, their returns, and the work of each step and row.

    The last work is what rows wait for at the end. Besides, how many each operation waits for, in
    their order, and which.

    A step has gates, work, next round's keys, in backward gates of the returns, and these. They
    leave after the work on their keys and the next round's keys, and come before the next round
    ends; a rank adds them before it works on the round after that.
    """
    rows, count, ways = len(begin), len(at), 2 if backward else 1
    keys, returns = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    gate, return_gate, computing = np.empty((3, steps + 1, rows), dtype=np.int64)
    stops = np.zeros((1 + ways) * steps * rows + rows + ways * count + 1, dtype=np.int32)
    most = 23 * rows * (steps + 1) + 2 * ways * count  # a row: 10 of gate, 7 of work, 6 of return
    deps = np.empty(most, dtype=np.int32)
    op, found, sent, back = 0, 0, 0, 0
    for step in range(steps + 1):
        for row in range(rows if step < steps else 0):
            gate[step, row] = first + op
            found = _put(deps, found, begin[row] if step == 0 else gate[step - 1, row])
            if step + 1 < len(room) and room[step + 1, row]:
                found = _put(deps, found, computing[room[step + 1, row], row])
            found = _put_some(deps, found, keys, last[step, row])
            if backward:
                found = _put_some(deps, found, returns, last[step - 1, row])
            op += 1
            stops[op] = found
        for row in range(rows):
            computing[step, row] = first + op
            found = _put(deps, found, begin[row] if step == 0 else computing[step - 1, row])
            found = _put_some(deps, found, keys, last[step, row, 2:])
            if backward:
                found = _put_some(deps, found, returns, last[step - 2, row])
            op += 1
            stops[op] = found
        while sent < count and at[sent] == step + 1:
            keys[sent] = first + op
            found = _put_ends(deps, found, keys, gate[step], ends[:, sent], before[:, sent])
            op, sent = op + 1, sent + 1
            stops[op] = found
        for row in range(rows if backward and step < steps else 0):
            return_gate[step, row] = first + op
            found = _put(deps, found, gate[step, row])
            found = _put_some(deps, found, keys, last[step + 1, row])
            if last[step, row, -1] >= 0:
                found = _put(deps, found, computing[step, row])
            op += 1
            stops[op] = found
        while backward and back < count and at[back] == step:
            returns[back] = first + op
            gates = return_gate[step]
            found = _put_ends(deps, found, returns, gates, ends[:, back], before[:, back])
            op, back = op + 1, back + 1
            stops[op] = found
    return keys, returns, computing, np.diff(stops), deps[:found]


@numba.njit(cache=True)
def _put(deps: Narrow, found: int, dep: int) -> int:
    deps[found] = dep
    return found + 1


@numba.njit(cache=True)
def _put_some(deps: Narrow, found: int, ops: Ints, which: Ints) -> int:
    for i in which:
        if i >= 0:
            found = _put(deps, found, ops[i])
    return found


@numba.njit(cache=True)
def _put_ends(deps: Narrow, found: int, ops: Ints, gate: Ints, ends: Ints, before: Ints) -> int:
    """Let a transfer wait at each end for the one before it, or else for the gate."""
    for end in range(2):
        dep = gate[ends[end]] if before[end] < 0 else ops[before[end]]
        found = _put(deps, found, dep)
    return found
