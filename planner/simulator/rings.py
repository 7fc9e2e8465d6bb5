"""Keys and values handed on round a ring of groups: in lock-step, asynchronously, or streamed.

A ring works on its own block first, and then on each that comes from the group before it. Cut by
heads, it is one ring for each interval.

    lockstep   a step begins on all ranks together, once computing and transfers of the last end
    async      a step begins on a rank once its own computing ends and its block is there; a block
               is handed on when the next rank has begun the step before, and nobody waits to send
    streamed   blocks are cut into chunks of about equal size, so that a large one is only more of
               them. A chunk is handed on as soon as it is there, in order; receive buffers have
               room for all. The mode of no library: it bounds what a ring could do.

In backward the gradients of keys and values follow their block round the ring, and one hop further.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import numpy as np

from hexiseq_triton.planner.exchange import ANSWER
from hexiseq_triton.planner.rates import Floats, Ints
from hexiseq_triton.planner.simulator.attention import Attention, Hops, Slowed

Ring = Literal["lockstep", "async", "streamed"]
MOST_CHUNKS = 256
"""About how many chunks a stream is cut into at most, so that graphs stay small."""


def ring(attention: Attention, mode: Ring, chunk_tokens: int) -> Ints:
    """Add one replica's attention with a ring; return what its rows wait for at the end.

    Args:
        attention: the replica's.
        mode: which ring.
        chunk_tokens: most tokens of a streamed chunk, unless that makes too many.
    """
    return _Rotation(attention, mode, chunk_tokens).add()


class _Rotation:
    """Blocks in the order in which they come to each group, and their operations, [steps, ..].

    Step t works on block t of a group: 0 is its own, merged where it is several chunks.
    """

    def __init__(self, attention: Attention, mode: Ring, chunk_tokens: int) -> None:
        self.attention = attention
        self.mode = mode
        view = self.view = attention.view
        self.sender = view.servers[view.group[view.entry_row] - 1, np.arange(len(view.entry_row))]
        self.chunks = _chunks(view.tokens, chunk_tokens if mode == "streamed" else None)
        self.steps = int(self.chunks.sum())
        self.owner = _owners(self.chunks)
        self._take()

    def _take(self) -> None:
        """Take the numbers of all operations, step by step."""
        rows, entries = len(self.view.rank), len(self.sender)
        gates = {"lockstep": 1, "async": rows, "streamed": 0}[self.mode]
        gradients = entries if self.attention.backward else 0
        widths = (gates, gradients, rows, entries)
        ops = self.attention.builder.take((self.steps + 1) * sum(widths))
        ops = ops.reshape(self.steps + 1, sum(widths))
        edges = np.cumsum((0, *widths))
        gate, self.gradient, self.computing, self.hop = (
            ops[:, a:b] for a, b in pairwise(edges.tolist())
        )
        self.gate = np.broadcast_to(gate, (self.steps + 1, rows)) if gates else gate

    def add(self) -> Ints:
        """Add everything; return what rows wait for at the end."""
        keys, gradients = self._moved()
        slowed = self.attention.slowed(*keys, *gradients)
        self._compute(slowed)
        for hops in keys:  # step t's keys travel in the section of the step before
            self.attention.move(self.hop[:-1], slowed, hops)
        for hops in gradients:
            self.attention.move(self.gradient[1:], slowed, hops, gradients=True)
        wait = {
            "lockstep": self._wait_in_step,
            "async": self._wait_for_blocks,
            "streamed": self._wait_in_streams,
        }
        wait[self.mode]()
        return self._done()

    def _moved(self) -> tuple[list[Hops], list[Hops]]:
        """Return the transfers of blocks 1, 2, .. to each entry, and of their gradients."""
        view, entry_row = self.view, self.view.entry_row
        to = view.group[entry_row]
        owner = self.owner[to].T  # [steps, entries]
        per_chunk = view.tokens[owner] / self.chunks[owner]
        num_bytes = view.bytes_per_token * view.entry_heads * per_chunk
        sender, receiver = (
            np.broadcast_to(row, owner.shape).ravel() for row in (entry_row[self.sender], entry_row)
        )
        arrives = np.where(owner == to, 0.0, num_bytes)  # its own are there
        keys = [self.attention.hops(sender, receiver, arrives)]
        if not self.attention.backward:
            return keys, []
        return keys, [self.attention.hops(sender, receiver, ANSWER * num_bytes)]

    def _compute(self, slowed: Slowed) -> None:
        group = self.view.group
        by_block = np.take_along_axis(self.view.share / self.chunks, self.owner, axis=1)
        by_block[self.owner == np.arange(len(self.owner))[:, None]] = 0.0
        share = np.vstack([np.diag(self.view.share)[group], by_block[group].T])
        self.attention.compute(self.computing, slowed, share)

    def _wait_in_step(self) -> None:
        """Let each step begin on all ranks together, and its transfers with it."""
        after, row = self.attention.builder.after, self.view.entry_row
        after(self.gate[0], self.attention.begin)
        after(self.gate[1:], self.computing[:-1])
        after(self.computing, self.gate)
        after(self.hop, self.gate[:, row])
        after(self.gate[1:, row], self.hop[:-1])
        if self.attention.backward:
            after(self.gradient[1:], self.gate[1:, row])
            after(self.gate[2:, row], self.gradient[1:-1])

    def _wait_for_blocks(self) -> None:
        """Let a step begin on each rank when its block has come."""
        after, row = self.attention.builder.after, self.view.entry_row
        after(self.gate[0], self.attention.begin)
        after(self.gate[1:], self.computing[:-1])
        after(self.computing, self.gate)
        at, entry = self._arrivals()
        after(self.gate[at + 1, row[entry]], self.hop[at, entry])
        after(self.hop, self.gate[:, row])
        after(self.hop[0], self.attention.begin[row[self.sender]])
        after(self.hop[1:], self.hop[:-1, self.sender])
        if self.attention.backward:
            after(self.gradient[1:], self.gate[1:, row])
            after(self.gradient[1:], self.computing[:-1, row[self.sender]])
            after(self.gradient[2:], self.gradient[1:-1, self.sender])

    def _wait_in_streams(self) -> None:
        """Let chunks be worked on and handed on as they come, each in its order."""
        after, view = self.attention.builder.after, self.view
        row, begin = view.entry_row, self.attention.begin
        after(self.computing[0], begin)
        after(self.computing[1:], self.computing[:-1])
        at, entry = self._arrivals()
        after(self.computing[at + 1, row[entry]], self.hop[at, entry])
        after(self.hop[1:], self.hop[:-1])
        after(self.hop[0], begin[row[self.sender]])
        own = self.chunks[view.group[row[self.sender]]]  # of each entry's sender
        block = np.arange(1, self.steps + 1)[:, None]
        there = block - own  # the block's number at its sender; up to 0 it is the sender's own
        at, entry = np.nonzero(there > 0)
        earlier = there[at, entry]
        after(self.hop[at, entry], self.hop[earlier - 1, self.sender[entry]])
        if self.attention.backward:
            worked = self.computing[np.maximum(there, 0), row[self.sender]]
            after(self.gradient[1:], worked)
            after(self.gradient[2:], self.gradient[1:-1])
            after(self.gradient[at + 1, entry], self.gradient[earlier, self.sender[entry]])

    def _arrivals(self) -> tuple[Ints, Ints]:
        """Return which hops bring a block, by step and entry: the last ones would bring its own."""
        to = self.view.group[self.view.entry_row]
        at, entry = np.nonzero(to != self.owner[to].T)
        return at, entry

    def _done(self) -> Ints:
        builder = self.attention.builder
        done = builder.take(len(self.view.rank))
        builder.after(done, self.computing[-1])
        if self.attention.backward:
            builder.after(done[self.view.entry_row], self.gradient[-1])
        return done


def _chunks(tokens: Floats, chunk_tokens: int | None) -> Ints:
    """Return into how many chunks each group's block is cut."""
    if chunk_tokens is None:
        return np.ones(len(tokens), dtype=np.int64)
    smallest = min(float(tokens[tokens > 0].min()), chunk_tokens)
    size = max(smallest, tokens.sum() / MOST_CHUNKS)
    result: Ints = np.maximum(1, np.ceil(tokens / size)).astype(np.int64)
    return result


def _owners(chunks: Ints) -> Ints:
    """Return [groups, blocks]: whose block comes to each group first, second, ..; last its own."""
    count = len(chunks)
    backwards = np.arange(count)[::-1]
    twice = np.tile(np.repeat(backwards, chunks[backwards]), 2)
    starts = np.cumsum(chunks[backwards]) - chunks[backwards]
    first = starts[count - 1 - (np.arange(count) - 1) % count]  # of the group before each
    result: Ints = twice[first[:, None] + np.arange(int(chunks.sum()))]
    return result
