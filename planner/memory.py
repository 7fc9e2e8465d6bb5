"""Memory of a rank at its peak: what stays for the whole step, and the fullest layer.

    bytes = fixed + tokens * per_token
            + group tokens * (q_heads * per_q_head + kv_heads * per_kv_head)
            + kv_heads * buffer_per_kv_head, where KV is exchanged
            + what the group's ranks reach at each other, where they share a node

`fixed` counts evenly sharded states (FSDP2 shards evenly, over idle ranks too), embedding and
output matrix gathered for the whole pass with the output's gradient, and the larger of two moments:
two gathered layers with one layer's gradients, or a chunk of logits with the float32 gradient of
the output matrix. `floor` is the end of a pass: no activations, but both matrices' gradients, in
bf16 and in float32 for their reduction. Everything that comes and goes is raised by the allocator's
slack. Heads count over all the group's tokens: that is what the all-to-all makes of them.

In a node the all-to-all goes through buffers that the ranks of a group map at each other, all as
large as the rank with the most heads needs (`hexiseq_triton/peer_slots.py`). They take the place of
what a rank would hold itself, packed inputs, gradients of outputs and of queries, which is counted
above; what the largest rank has more than this one comes on top:

    group tokens * ((most q_heads - q_heads) * peer_per_q_head
                    + (most kv_heads - kv_heads) * peer_per_kv_head) + peer_fixed
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hexiseq_triton.planner.plans import Exchange
from hexiseq_triton.planner.problem import Problem
from hexiseq_triton.planner.rates import Floats
from hexiseq_triton.planner.rows import Rows, sums_by
from hexiseq_triton.planner.traffic import BF16, FLOAT32

STATE_BYTES = 4 * FLOAT32
"""A parameter, its gradient, and Adam's two moments."""
LOGITS_CHUNK_TOKENS = 1024
"""`cross_entropy.CHUNK_ROWS`."""
LOGIT_BYTES = 2 * BF16 + 2 * FLOAT32
"""The product, its float32 copy, log-probabilities, and the gradient in bf16."""
CONTEXT_BYTES = 1e9
"""CUDA context, communicators and code; assumed."""
FETCHERS = 2
"""Groups that fetch the same head of a rank at a time: they reach it one after the other, and the
next before the last is done where it has fewer tokens."""
PEER_GRANULE = 32 << 20
"""`peer_memory` takes memory in such steps, for each of two directions."""
DELTA_BYTES = 8
"""What the buffers have room for in each row of delta, whatever its dtype."""
LARGEST_SLOT_BYTES = 1024
"""Of one head of one token: larger ones, and sizes other than powers of two, are sent."""
ALLOCATOR_SLACK = 0.08
"""Reserved but unused by PyTorch's allocator; reports lie between 6 and 10 %."""


@dataclass(frozen=True)
class MemoryModel:
    """The coefficients of the formula above, in bytes."""

    fixed: float
    floor: float
    per_token: float
    per_q_head: float
    per_kv_head: float
    buffer_per_kv_head: float
    block_per_kv_head: float
    """A token's K and V, and its dK and dV, for one head: what baselines' exchanges buffer."""
    peer_per_q_head: float
    peer_per_kv_head: float
    peer_fixed: float

    def rank_bytes(self, rows: Rows, exchange: Exchange = "routes") -> Floats:
        """Return the peak of every row of a layout, the floor left out."""
        return self.head_bytes(rows, exchange) + self.fixed + self.per_token * rows.tokens

    def head_bytes(self, rows: Rows, exchange: Exchange = "routes") -> Floats:
        """Return what a rank's heads take: group tokens by heads, and receive buffers."""
        per_token = rows.q_heads * self.per_q_head + rows.kv_heads * self.per_kv_head
        held: Floats = rows.group_tokens[rows.group] * per_token
        stream = sums_by(rows.replica, rows.group_tokens)[rows.replica]
        buffers = self.buffers(exchange, rows.group_tokens, stream)
        per_kv_head = (np.ones(len(stream)) * buffers)[rows.group]
        return held + rows.exchanges * rows.kv_heads * per_kv_head + self._peers(rows)

    def _peers(self, rows: Rows) -> Floats:
        """Return what the all-to-all's buffers add on each row, in groups that share a node."""
        q_heads = rows.most(rows.q_heads)[rows.group] - rows.q_heads
        kv_heads = rows.most(rows.kv_heads)[rows.group] - rows.kv_heads
        per_token = q_heads * self.peer_per_q_head + kv_heads * self.peer_per_kv_head
        shares = ((rows.group_sizes > 1) & ~rows.spans_nodes)[rows.group]
        result: Floats = shares * (rows.group_tokens[rows.group] * per_token + self.peer_fixed)
        return result

    def buffers(
        self, exchange: Exchange, group_tokens: Floats | float, stream_tokens: Floats | float
    ) -> Floats | float:
        """Return bytes for each KV head that the exchange holds of other groups.

        Args:
            exchange: how KV travels.
            group_tokens: tokens of each group.
            stream_tokens: tokens of each group's replica.
        """
        if exchange == "routes":
            return self.buffer_per_kv_head
        if exchange == "all_gather":
            return self.block_per_kv_head * stream_tokens
        # the block that is worked on and the one that arrives; of two rings, one of each
        blocks = 4 if exchange == "double_ring" else 2
        return blocks * self.block_per_kv_head * group_tokens


def peak_bytes(problem: Problem, rows: Rows, exchange: Exchange = "routes") -> Floats:
    """Return the peak of every rank of the world; idle ranks hold what `fixed` counts."""
    memory = memory_model(problem)
    used = np.full(problem.cluster.world_size, memory.fixed)
    used[rows.rank] = memory.rank_bytes(rows, exchange)
    result: Floats = np.ceil(np.maximum(used, memory.floor))
    return result


def memory_model(problem: Problem) -> MemoryModel:
    """Return the coefficients for a model, workload and number of ranks."""
    model, workload, exchange = problem.model, problem.workload, problem.exchange
    slack = 1 + ALLOCATOR_SLACK
    matrix, head_dim = model.vocab * model.hidden, model.head_dim
    matrices = matrix if model.tied else 2 * matrix
    states = STATE_BYTES * model.parameters / problem.cluster.world_size + CONTEXT_BYTES

    layer = (2 * BF16 + BF16 + FLOAT32) * model.parameters_per_layer
    chunk = min(LOGITS_CHUNK_TOKENS, workload.step_tokens)
    logits = chunk * model.vocab * LOGIT_BYTES + FLOAT32 * matrix
    outside = BF16 * (matrices + matrix)

    # saved for backward: inputs of two norms, of q k v and MLP, of the output product, the MLP's
    inner = (4 if model.gated else 2) * model.ffn
    heads_width, kv_width = model.heads * head_dim, model.kv_heads * head_dim
    saved = BF16 * (4 * model.hidden + heads_width + inner)
    # only while a layer runs: q k v, packed for the all-to-all too, and gradients of the MLP
    passing = BF16 * (2 * (heads_width + 2 * kv_width) + 2 * model.hidden + 2 * model.ffn)
    if workload.recompute == "full":
        per_token = BF16 * model.hidden * model.layers + saved + passing
    else:
        per_token = model.layers * saved + passing

    # after the all-to-all, saved: q and lse; k and v. While backward runs: do in bf16, delta and dq
    # in float32, dq in bf16; dk and dv in float32
    layers = model.layers if workload.recompute == "none" else 1
    q_head = layers * (BF16 * head_dim + FLOAT32) + (2 * BF16 + FLOAT32) * head_dim + FLOAT32
    kv_head = layers * 2 * BF16 * head_dim + 2 * FLOAT32 * head_dim

    # two rounds: rows that arrive and their dk and dv, rows that leave and theirs, which return. A
    # round holds the chunks that begin in its window, so one more may reach out of it
    rows = min((exchange.window + 1) * exchange.chunk_tokens, workload.step_tokens)
    row = 2 * head_dim * (BF16 + FLOAT32)
    buffer = 2 * rows * row * (1 + FETCHERS)
    slot_bytes = BF16 * head_dim
    peers = slot_bytes <= LARGEST_SLOT_BYTES and slot_bytes & (slot_bytes - 1) == 0
    return MemoryModel(
        fixed=states + slack * (outside + max(layer, logits)),
        floor=states + slack * (2 * BF16 + FLOAT32) * matrices,
        per_token=slack * per_token,
        per_q_head=slack * q_head,
        per_kv_head=slack * kv_head,
        buffer_per_kv_head=slack * buffer,
        block_per_kv_head=slack * 2 * head_dim * (BF16 + FLOAT32),
        # q or do in, o or dq out, and delta; k and v in, dk and dv out in float32
        peer_per_q_head=peers * (2 * BF16 * head_dim + DELTA_BYTES),
        peer_per_kv_head=peers * 2 * (BF16 + FLOAT32) * head_dim,
        peer_fixed=peers * 2 * PEER_GRANULE,
    )
