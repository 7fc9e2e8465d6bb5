"""One direction of one layer as a graph: token-wise work, all-to-alls, attention and its exchange.

All ranks begin a layer together: FSDP's collectives make them meet once a layer. Inside it each
waits only for what it needs: a group's all-to-all for its ranks, attention for keys that arrive.
Beside the layer FSDP moves the next one's parameters, and in backward gradients. Backward first
computes forward again where the workload recomputes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from hexiseq_triton.planner.cost import Cost, Layer
from hexiseq_triton.planner.problem import Work
from hexiseq_triton.planner.rates import Floats, Ints, together
from hexiseq_triton.planner.simulator.attention import Attention
from hexiseq_triton.planner.simulator.conditions import Conditions
from hexiseq_triton.planner.simulator.direct import Direct
from hexiseq_triton.planner.simulator.double_ring import double_ring
from hexiseq_triton.planner.simulator.gathered import gathered
from hexiseq_triton.planner.simulator.graph import (
    ALL_TO_ALL,
    ATTENTION,
    FSDP,
    TOKEN_WISE,
    Builder,
    Graph,
)
from hexiseq_triton.planner.simulator.links import Links, Uses
from hexiseq_triton.planner.simulator.replicas import ReplicaView, replica_views
from hexiseq_triton.planner.simulator.rings import Rotation
from hexiseq_triton.planner.simulator.rounds import rounds_of
from hexiseq_triton.planner.traffic import BF16, FLOAT32, all_to_all

Mode = Literal["direct", "async", "streamed", "lockstep", "double_ring", "all_gather"]
"""How keys and values travel between groups; "direct" is what the runtime does."""
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True)
class Compiler:
    """Turns a cost model's layout and prices into graphs; layers without FSDP if it is left out."""

    cost: Cost
    mode: Mode
    conditions: Conditions
    fsdp: bool = True

    @cached_property
    def links(self) -> Links:
        return Links(self.cost.problem.rates, self.conditions)

    @cached_property
    def views(self) -> list[ReplicaView]:
        return replica_views(self.cost)

    @cached_property
    def _alone(self) -> Ints:
        """Rows whose replica has one group: they exchange nothing."""
        result: Ints = np.flatnonzero(~self.cost.rows.exchanges)
        return result

    @cached_property
    def _exchanges(self) -> list[Callable[[Attention], Ints]]:
        """What adds attention of each of `views`."""
        return [self._exchange(view) for view in self.views]

    def _exchange(self, view: ReplicaView) -> Callable[[Attention], Ints]:
        links, exchange = self.links, self.cost.problem.exchange
        if self.mode == "direct":
            spread = exchange.spreads(links.rates.node[view.rank])
            return Direct(links, view, rounds_of(view, exchange, spread)).add
        if self.mode == "all_gather":
            return gathered
        if self.mode == "double_ring":
            return double_ring
        return Rotation(links, view, self.mode, exchange.chunk_tokens).add

    def builder(self) -> Builder:
        return Builder(self.links.num_ports)

    # ---------------------------------------------------------------- layers

    def forward(self) -> Graph:
        """Return one layer's forward, with the next layer's parameters on their way."""
        builder = self.builder()
        slower, slower_fsdp = self._slower_beside_fsdp([self.cost.forward], [BF16])
        self._sharded(builder, [BF16], slower_fsdp)
        self._pass(builder, builder.take(len(self.cost.rows.rank)), slower)
        return builder.build()

    def backward(self) -> Graph:
        """Return one layer's backward, and before it forward if that is computed again."""
        cost, moved = self.cost, [BF16, FLOAT32]
        again = cost.problem.workload.recompute == "full"
        layers = [cost.forward, cost.backward] if again else [cost.backward]
        slower, slower_fsdp = self._slower_beside_fsdp(layers, moved)
        builder = self.builder()
        self._sharded(builder, moved, slower_fsdp)
        ready = builder.take(len(cost.rows.rank))
        if again:
            ready = self._pass(builder, ready, slower)
        self._pass(builder, ready, slower, backward=True)
        return builder.build()

    def _pass(
        self, builder: Builder, ready: Ints, slower: Floats, *, backward: bool = False
    ) -> Ints:
        """Add a layer in one direction; return the last operation of each row."""
        cost, rows = self.cost, self.cost.rows
        layer = cost.backward if backward else cost.forward
        times = (Work.BACKWARD_LINEAR, Work.BACKWARD_ATTENTION) if backward else (1.0, 1.0)
        qkv = self._projections_share
        before, after = (1 - qkv, qkv) if backward else (qkv, 1 - qkv)
        into, out = self._widths(backward)

        linear = times[0] * cost.problem.work.linear_per_token * rows.tokens
        seconds = slower * layer.token_wise
        work = self._computed(builder, TOKEN_WISE, ready, before * seconds, before * linear)
        begin = self._shuffled(builder, work, into, 1)
        pairs = times[1] * self._attention_flops
        done = self._attention(builder, begin, slower * layer.attention, pairs, backward)
        back = self._shuffled(builder, done, out, 2 if backward else 1)
        return self._computed(builder, TOKEN_WISE, back, after * seconds, after * linear)

    def _computed(
        self, builder: Builder, kind: int, ready: Ints, seconds: Floats, flops: Floats
    ) -> Ints:
        ops = builder.take(len(ready))
        builder.compute(ops, kind, self.cost.rows.rank, seconds, flops)
        builder.after(ops, ready)
        return ops

    def _attention(
        self, builder: Builder, begin: Ints, seconds: Floats, flops: Floats, backward: bool
    ) -> Ints:
        """Add attention of all rows; return the last operation of each."""
        done = np.zeros(len(begin), dtype=np.int64)
        alone = self._alone
        ops = done[alone] = builder.take(len(alone))
        rank = self.cost.rows.rank[alone]
        builder.compute(ops, ATTENTION, rank, seconds[alone], flops[alone])
        builder.after(ops, begin[alone])
        for view, exchange in zip(self.views, self._exchanges, strict=True):
            at = view.rows
            done[at] = exchange(
                Attention(builder, self.links, view, seconds[at], flops[at], begin[at], backward)
            )
        return done

    def _shuffled(self, builder: Builder, ready: Ints, width: Floats, calls: int) -> Ints:
        """Add all-to-alls of `width` bytes a token; return what each row waits for."""
        rows, rates = self.cost.rows, self.links.rates
        ops = builder.take(len(rows.group_sizes))
        builder.after(ops[rows.group], ready)
        across = rows.spans_nodes[rows.group]
        latency = np.where(
            across, rates.across_latency[rows.rank], rates.in_node_latency[rows.rank]
        )
        latency = np.where(rows.group_sizes > 1, calls * rows.most(latency), 0.0)
        uses = self.links.all_to_all(rows.rank, all_to_all(rows, width))
        groups = rows.group.astype(np.int32)
        builder.collective(ops, ALL_TO_ALL, latency, uses._replace(at=groups[uses.at]))
        return ops[rows.group]

    def _widths(self, backward: bool) -> tuple[Floats, Floats]:
        """Return bytes a token of each row's heads, into attention and out of it.

        Forward q, k and v go in and o comes out. Backward dO goes in with one float32 for each row,
        and dq comes out, and dk and dv in float32.
        """
        head, rows = self.cost.problem.model.head_dim, self.cost.rows
        q, kv = rows.q_heads, 2 * rows.kv_heads
        if backward:
            return (BF16 * head + FLOAT32) * q, BF16 * head * q + FLOAT32 * head * kv
        return BF16 * head * (q + kv), BF16 * head * q

    @cached_property
    def _projections_share(self) -> float:
        """The share of a layer's matrices that makes q, k and v: what comes before attention."""
        model = self.cost.problem.model
        made = model.hidden * (model.heads + 2 * model.kv_heads) * model.head_dim
        return made / model.layer_matrix_parameters

    @cached_property
    def _attention_flops(self) -> Floats:
        """FLOPs of attention in one forward pass of a layer, for each row."""
        cost, rank = self.cost, self.cost.rows.rank
        result: Floats = cost.forward.attention * cost.problem.rates.attention_forward[rank]
        return result

    # ---------------------------------------------------------------- FSDP

    def _slower_beside_fsdp(self, layers: list[Layer], widths: list[int]) -> tuple[Floats, float]:
        """Return how many times longer each row computes beside FSDP, and FSDP beside it."""
        if not self.fsdp:
            return np.ones(len(self.cost.rows.rank)), 1.0
        parameters = self.cost.problem.model.parameters_per_layer
        moving = sum(widths) * parameters * self.links.rates.seconds_per_sharded_byte
        alone = np.sum([layer.token_wise + layer.attention for layer in layers], axis=0)
        overlap = self.links.rates.overlap
        computing, _ = together(alone, moving, overlap)
        _, transfer = together(float(alone.max()), moving, overlap)
        slower: Floats = np.where(alone > 0, computing / np.where(alone > 0, alone, 1.0), 1.0)
        return slower, transfer / moving if moving > 0 else 1.0

    def _sharded(self, builder: Builder, widths: list[int], slower: float = 1.0) -> None:
        """Add a layer's collectives one after the other, for `widths` bytes of each parameter."""
        if not self.fsdp:
            return
        parameters = self.cost.problem.model.parameters_per_layer
        ops = builder.take(len(widths))
        for width, op in zip(widths, ops, strict=True):
            self.collective(builder, op[None], width * parameters, slower)
        builder.after(ops[1:], ops[:-1])

    def collective(self, builder: Builder, op: Ints, num_bytes: float, slower: float = 1.0) -> None:
        """Let an operation gather `num_bytes` of even shards on every rank, or reduce them.

        Rings run through nodes: a rank takes in all but its own shard through its port, and
        together a node's NICs what other nodes hold.
        """
        rates, world = self.links.rates, self.links.world_size
        sizes = np.bincount(rates.node)
        near = np.where(sizes[rates.node] > 1, (world - 1) / world * num_bytes, 0.0)
        nics = np.bincount(rates.node, weights=rates.across)
        outside = (world - sizes) / world * num_bytes
        far = outside[rates.node] * rates.across / nics[rates.node]
        uses: Uses = self.links.in_rings(np.arange(world), near, far)
        uses = uses._replace(at=0 * uses.at, seconds=slower * uses.seconds)
        builder.collective(op, FSDP, 0.0, uses)
