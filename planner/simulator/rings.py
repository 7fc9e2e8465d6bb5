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

from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np

from hexiseq_triton.planner.exchange import ANSWER
from hexiseq_triton.planner.rates import Floats, Ints
from hexiseq_triton.planner.simulator.attention import Attention, Hops
from hexiseq_triton.planner.simulator.links import Links
from hexiseq_triton.planner.simulator.replicas import ReplicaView

Ring = Literal["lockstep", "async", "streamed"]
MOST_CHUNKS = 256
"""About how many chunks a stream is cut into at most, so that graphs stay small."""


class Rotation:
    """One replica's ring; its passes share what depends on the layout alone.

    Blocks stand in the order in which they come to each group, and operations are [steps, ..]. Step
    t works on block t of a group: 0 is its own, merged where it is several chunks.
    """

    def __init__(self, links: Links, view: ReplicaView, mode: Ring, chunk_tokens: int) -> None:
        """Cut blocks, where they are streamed, into chunks of `chunk_tokens` or not too many."""
        self.links, self.view, self.mode = links, view, mode
        self.sender = view.servers[view.group[view.entry_row] - 1, np.arange(len(view.entry_row))]
        self.chunks = _chunks(view.tokens, chunk_tokens if mode == "streamed" else None)
        self.steps = int(self.chunks.sum())
        self.owner = _owners(self.chunks)
        to = view.group[view.entry_row]
        self.arrives = to != self.owner[to].T  # [steps, entries]; the last ones bring their own

    def _take(self) -> None:
        """Take the numbers of all operations, step by step."""
        rows, entries = len(self.view.rank), len(self.sender)
        gates = {"lockstep": 1, "async": rows, "streamed": 0}[self.mode]
        gradients = entries if self.attention.backward else 0
        widths = (gates, gradients, rows, entries)
        self.width = sum(widths)
        ops = self.attention.builder.take((self.steps + 1) * self.width)
        ops = ops.reshape(self.steps + 1, self.width)
        edges = np.cumsum((0, *widths))
        gate, self.gradient, self.computing, self.hop = (
            ops[:, a:b] for a, b in pairwise(edges.tolist())
        )
        self.gate = np.broadcast_to(gate, (self.steps + 1, rows)) if gates else gate

    def add(self, attention: Attention) -> Ints:
        """Add one direction of attention; return what its rows wait for at the end."""
        self.attention = attention
        self._take()
        gradients = [self._gradients] if attention.backward else []
        slowed = attention.slowed(self._keys, *gradients)
        attention.compute(self.computing, slowed, self._shares)
        attention.move(self.hop[:-1], slowed, self._keys)  # step t's travel in the step before
        for hops in gradients:
            attention.move(self.gradient[1:], slowed, hops, gradients=True)
        wait = {
            "lockstep": self._wait_in_step,
            "async": self._wait_for_blocks,
            "streamed": self._wait_in_streams,
        }
        wait[self.mode]()
        return self._done()

    @cached_property
    def _num_bytes(self) -> Floats:
        """Of blocks 1, 2, .. to each entry."""
        view = self.view
        owner = self.owner[view.group[view.entry_row]].T  # [steps, entries]
        per_chunk = view.tokens[owner] / self.chunks[owner]
        result: Floats = view.bytes_per_token * view.entry_heads * per_chunk
        return result

    @cached_property
    def _keys(self) -> Hops:
        return self._hops(np.where(self.arrives, self._num_bytes, 0.0))

    @cached_property
    def _gradients(self) -> Hops:
        return self._hops(ANSWER * self._num_bytes)

    def _hops(self, num_bytes: Floats) -> Hops:
        row = self.view.entry_row
        sender, receiver = (
            np.broadcast_to(end, num_bytes.shape).ravel() for end in (row[self.sender], row)
        )
        return Hops.between(self.links, self.view, (sender, receiver), num_bytes)

    @cached_property
    def _shares(self) -> Floats:
        """What part of a row's attention each step is."""
        group, share = self.view.group, self.view.share
        by_block = np.take_along_axis(share / self.chunks, self.owner, axis=1)
        by_block[self.owner == np.arange(len(self.owner))[:, None]] = 0.0
        return np.vstack([np.diag(share)[group], by_block[group].T])

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
        at, entry = np.nonzero(self.arrives)
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
        after, view, number = self.attention.builder.after, self.view, self._number
        row, begin = view.entry_row, self.attention.begin
        after(self.computing[0], begin)
        after(self.computing[1:], self.computing[:-1])
        at, entry = np.nonzero(self.arrives)
        after(number(self.computing, at + 1, row[entry]), number(self.hop, at, entry))
        after(self.hop[1:], self.hop[:-1])
        after(self.hop[0], begin[row[self.sender]])
        own = self.chunks[view.group[row[self.sender]]]  # of each entry's sender
        block = np.arange(1, self.steps + 1)[:, None]
        there = block - own  # the block's number at its sender; up to 0 it is the sender's own
        at, entry = np.nonzero(there > 0)
        earlier = there[at, entry]
        sender = self.sender[entry]
        after(number(self.hop, at, entry), number(self.hop, earlier - 1, sender))
        if self.attention.backward:
            worked = number(self.computing, np.maximum(there, 0), row[self.sender])
            after(self.gradient[1:], worked)
            after(self.gradient[2:], self.gradient[1:-1])
            after(number(self.gradient, at + 1, entry), number(self.gradient, earlier, sender))

    def _number(self, ops: Ints, step: Ints, column: Ints) -> Ints:
        """Return `ops[step, column]`, sooner than numpy does."""
        result: Ints = ops[0, 0] + self.width * step + column
        return result

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
