"""Keys and values round two rings: inside windows of groups, and from window to window.

LoongTrain's exchange. Groups stand in windows of equal size, as large as can be without an inner
hop leaving its node. A window works on the blocks of one window after the other: at first on its
own, and while these go round the inner ring, those it began with go on to the window behind it, in
the outer ring. With one window, or with windows of one group, it is the asynchronous ring.

A step begins on a rank once its own computing ends and its block is there. A block is handed on
inside the window when the next rank has begun the step before; to the next window when that has
begun the round before. In backward the gradients of keys and values go round the inner ring with
their block and one hop further, where those of the windows before join them, and then on to the
next window, the last time home.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hexiseq_triton.planner.exchange import ANSWER
from hexiseq_triton.planner.rates import Ints
from hexiseq_triton.planner.simulator.attention import Attention, Hops
from hexiseq_triton.planner.simulator.replicas import ReplicaView


def double_ring(attention: Attention) -> Ints:
    """Add one replica's attention with two rings; return what its rows wait for at the end."""
    return _Windows(attention, window_of(attention.view, attention.links.rates.node)).add()


def window_of(view: ReplicaView, node: Ints) -> int:
    """Return how many groups make a window; `node` is that of each rank."""
    count = view.num_groups
    here = node[view.rank[view.entry_row]]
    for window in range(count, 1, -1):
        if count % window == 0:
            before = _before(count, window)[0][view.group[view.entry_row]]
            sender = view.servers[before, np.arange(len(before))]
            if (node[view.rank[view.entry_row[sender]]] == here).all():
                return window
    return 1


def _before(count: int, window: int) -> tuple[Ints, Ints]:
    """Return who comes before each group in its window, and in the window before."""
    group = np.arange(count)
    first = group - group % window
    return first + (group - 1) % window, (group - window) % count


class _Windows:
    """Operations by step and by round: step t is step `t % window` of round `t // window`.

    What travels is numbered by when it may begin: `inner` has what step `inner_steps + 1` works on,
    and `outer` what rounds 1, 2, .. begin with. `inner_back` carries gradients after each step, and
    `outer_back` after each round, once who gets them has begun what follows.
    """

    def __init__(self, attention: Attention, window: int) -> None:
        self.attention = attention
        view = self.view = attention.view
        self.window, self.steps = window, view.num_groups
        self.to = view.group[view.entry_row]
        entries = np.arange(len(view.entry_row))
        inner, outer = _before(self.steps, window)
        self.inner_sender = view.servers[inner[self.to], entries]
        self.outer_sender = view.servers[outer[self.to], entries]
        self._take(len(view.rank), len(entries))

    def _take(self, rows: int, entries: int) -> None:
        """Take the numbers of all operations, step by step, and of what follows the last."""
        step = np.arange(self.steps + 1)
        first, last = step % self.window == 0, (step + 1) % self.window == 0
        works, follows = step < self.steps, (step > 0) & self.attention.backward
        parts = (
            (np.ones_like(works), rows),
            (follows, entries),
            (follows & first, entries),
            (works, rows),
            (works & ~last, entries),
            (first & (step + self.window < self.steps), entries),
        )
        sizes = np.stack([taken * width for taken, width in parts], axis=1)
        ops = self.attention.builder.take(int(sizes.sum()))
        starts = (np.cumsum(sizes) - sizes.ravel()).reshape(sizes.shape)
        found = [
            ops[starts[taken, part, None] + np.arange(width)]
            for part, (taken, width) in enumerate(parts)
        ]
        self.gate, self.inner_back, self.outer_back, self.computing, self.inner, self.outer = found
        self.inner_steps = np.flatnonzero(works & ~last)

    def add(self) -> Ints:
        """Add everything; return what rows wait for at the end."""
        moves = [(ops, self._hops(*moved), back) for ops, moved, back in self._moves()]
        slowed = self.attention.slowed(*(hops for _, hops, _ in moves))
        group, step = np.arange(self.steps), np.arange(self.steps)[:, None]
        share = self.view.share[group, self._block(group, step)][:, self.view.group]
        self.attention.compute(self.computing, slowed, share)
        for ops, hops, back in moves:
            self.attention.move(ops, slowed, hops, gradients=back)
        self._wait()
        if self.attention.backward:
            self._wait_for_gradients()
        return self._done()

    # ---------------------------------------------------------------- what moves

    def _block(self, group: Ints, step: Ints, later: int = 0) -> Ints:
        """Return whose block groups work on in steps, or `later` in the same round: after its last
        step comes the block of its first again."""
        first = (group - group % self.window - step // self.window * self.window) % self.steps
        result: Ints = first + (group - step % self.window - later) % self.window
        return result

    def _moves(self) -> Iterator[tuple[Ints, tuple[Ints, Ints, float], bool]]:
        """Yield transfers, who sends whose blocks and how many times their bytes, and whether these
        are gradients."""
        steps, starts = self.inner_steps, np.arange(0, self.steps, self.window)
        yield self.inner, (self.inner_sender, self._arriving(steps), 1.0), False
        yield self.outer, (self.outer_sender, self._block(self.to, starts[1:, None]), 1.0), False
        if self.attention.backward:
            block = self._arriving(np.arange(self.steps))
            yield self.inner_back, (self.inner_sender, block, ANSWER), True
            block = self._block((self.to - self.window) % self.steps, starts[:, None])
            yield self.outer_back, (self.outer_sender, block, ANSWER), True

    def _arriving(self, steps: Ints) -> Ints:
        """Return whose block comes to each entry after these steps, in the inner ring."""
        return self._block(self.to, steps[:, None], later=1)

    def _hops(self, sender: Ints, block: Ints, times: float) -> Hops:
        """Return transfers [.., entries] of blocks; what would go to its sender stays."""
        view, row = self.view, self.view.entry_row
        moves = sender != np.arange(len(sender))
        num_bytes = times * view.bytes_per_token * view.entry_heads * view.tokens[block] * moves
        senders, receivers = (
            np.broadcast_to(each, block.shape).ravel() for each in (row[sender], row)
        )
        return Hops.between(self.attention.links, view, (senders, receivers), num_bytes)

    # ---------------------------------------------------------------- who waits for what

    def _wait(self) -> None:
        """Let steps begin, and blocks be handed on, once what they need is there."""
        after, row, gate = self.attention.builder.after, self.view.entry_row, self.gate
        begin, starts = self.attention.begin, slice(0, self.steps - self.window, self.window)
        brings = np.empty((self.steps, len(row)), dtype=np.int64)
        brings[0] = begin[row]
        brings[self.inner_steps + 1] = self.inner
        brings[self.window :: self.window] = self.outer
        after(gate[0], begin)
        after(gate[1:], self.computing)
        after(gate[1:-1, row], brings[1:])
        after(self.computing, gate[:-1])
        after(self.inner, gate[self.inner_steps][:, row])
        after(self.inner, brings[self.inner_steps][:, self.inner_sender])
        after(self.outer, gate[starts, row])
        after(self.outer, brings[starts, self.outer_sender])

    def _wait_for_gradients(self) -> None:
        """Let gradients go on once they are computed and those before them have come."""
        after, row, gate = self.attention.builder.after, self.view.entry_row, self.gate
        back, home, computing = self.inner_back, self.outer_back, self.computing
        last, later = slice(self.window - 1, None, self.window), self.inner_steps + 1
        after(back, computing[:, row[self.inner_sender]])
        after(back[last], computing[last, row])
        after(back[later - 1], gate[later][:, row])
        after(back[later], back[later - 1][:, self.inner_sender])
        after(home, gate[1:][last, row])
        after(home, back[last, self.outer_sender])
        after(home[1:], home[:-1, self.outer_sender])

    def _done(self) -> Ints:
        builder = self.attention.builder
        done = builder.take(len(self.view.rank))
        builder.after(done, self.computing[-1])
        if self.attention.backward:
            builder.after(done[self.view.entry_row], self.outer_back[-1])
        return done
