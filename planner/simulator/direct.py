"""The runtime's exchange: each chunk straight from its owner to who needs it, in rounds.

As the runtime does (`ring`, `exchange`), a rank takes its transfers in one order: keys of rounds 1
and 2, then after the work on round r the gradients of its keys, on their way home, and the keys of
round r + 2. A transfer begins once both of its ends are there, keys also once there is room: two
rounds that arrive take turns. In backward own keys fill rounds in which nothing arrives; of the
rest half comes first and half last.
"""

from __future__ import annotations

import numpy as np

from hexiseq_triton.planner.rates import Floats, Ints
from hexiseq_triton.planner.simulator.attention import Attention
from hexiseq_triton.planner.simulator.rounds import Rounds


def direct(attention: Attention, rounds: Rounds) -> Ints:
    """Add one replica's attention; return what its rows wait for at the end."""
    return _Direct(attention, rounds).add()


class _Direct:
    """Operations of round after round. Round 0 is of own keys, and in backward the last one too."""

    def __init__(self, attention: Attention, rounds: Rounds) -> None:
        self.attention, self.rounds = attention, rounds
        self.ends = rounds.ends
        self.sender, self.receiver = (end.row for end in rounds.ends)
        self.steps = rounds.count + (2 if attention.backward else 1)
        self._take()

    def _take(self) -> None:
        """Take numbers, in each step for its gates and work, next round's keys, and returns."""
        row, at = np.arange(len(self.attention.view.rank)), self.rounds.at
        starts = np.searchsorted(at, np.arange(self.steps + 2))
        moved, each = np.diff(starts), np.full(self.steps, len(row))
        parts = [each, each, moved[1:]]
        if self.attention.backward:
            parts += [each, moved[:-1]]
        sizes = np.stack(parts, axis=1)
        ops = self.attention.builder.take(int(sizes.sum()))
        first = ops[0] + np.cumsum(sizes).reshape(sizes.shape) - sizes
        within = np.arange(len(at)) - starts[at]
        self.gate, self.computing = (first[:, part, None] + row for part in (0, 1))
        self.keys = first[at - 1, 2] + within
        if self.attention.backward:
            self.return_gate = first[:, 3, None] + row
            self.returns = first[at, 4] + within

    def add(self) -> Ints:
        """Add everything; return what rows wait for at the end."""
        attention, view = self.attention, self.attention.view
        heads = view.entry_heads[self.rounds.receiver]
        num_bytes = view.bytes_per_token * heads * self.rounds.tokens
        keys = attention.hops(self.sender, self.receiver, num_bytes)
        returns = [keys.returned()] if attention.backward else []
        slowed = attention.slowed(keys, *returns)
        attention.compute(self.computing, slowed, self._shares(heads))
        attention.move(self.keys, slowed, keys)
        self._in_turns(self.keys)
        for hops in returns:
            attention.move(self.returns, slowed, hops, gradients=True)
            self._in_turns(self.returns)
        self._wait()
        if attention.backward:
            self._wait_for_returns()
        return self._done()

    def _in_turns(self, ops: Ints) -> None:
        for end in self.ends:
            self.attention.builder.after(ops[end.later], ops[end.before])

    def _shares(self, heads: Floats) -> Floats:
        """Return [steps, rows], what part of a row's attention each round is."""
        view = self.attention.view
        own = np.diag(view.share)[view.group]
        share = np.zeros((self.steps, len(own)))
        share[0] = own
        if self.attention.backward:
            share[:] = own * self.rounds.own
        pair = view.group[self.receiver], view.group[self.sender]
        of_heads = heads / np.diff(view.kv_ranges, axis=1)[self.receiver, 0]
        part = view.share[pair] * of_heads * self.rounds.tokens / view.fetched[pair]
        np.add.at(share, (self.rounds.at, self.receiver), part)
        return share

    def _wait(self) -> None:
        after, at, begin = self.attention.builder.after, self.rounds.at, self.attention.begin
        after(self.gate[0], begin)
        after(self.gate[1:], self.gate[:-1])
        step, row = np.nonzero(self.rounds.room)
        after(self.gate[step - 1, row], self.computing[self.rounds.room[step, row], row])
        after(self.computing[0], begin)
        after(self.computing[1:], self.computing[:-1])
        for end in self.ends:
            first, last = end.first, end.last
            after(self.keys[first], self.gate[at[first] - 1, end.row[first]])
            after(self.gate[at[last], end.row[last]], self.keys[last])
        arrived = self.ends[1].last
        after(self.computing[at[arrived], self.receiver[arrived]], self.keys[arrived])

    def _wait_for_returns(self) -> None:
        """Let gradients leave after the work and the next round's keys, and come before the end."""
        after, at = self.attention.builder.after, self.rounds.at
        after(self.return_gate, self.gate)
        for end in self.ends:
            first, last, row = end.first, end.last, end.row
            after(self.returns[first], self.return_gate[at[first], row[first]])
            after(self.return_gate[at[last] - 1, row[last]], self.keys[last])
            after(self.gate[at[last] + 1, row[last]], self.returns[last])
            added = last[at[last] + 2 < self.steps]  # a rank adds what returned before it works on
            after(self.computing[at[added] + 2, row[added]], self.returns[added])
        worked = at[self.ends[1].last], self.receiver[self.ends[1].last]
        after(self.return_gate[worked], self.computing[worked])

    def _done(self) -> Ints:
        builder = self.attention.builder
        done = builder.take(len(self.attention.view.rank))
        builder.after(done, self.computing[-1])
        if self.attention.backward:
            for end in self.ends:
                builder.after(done[end.row[end.last]], self.returns[end.last])
        return done
