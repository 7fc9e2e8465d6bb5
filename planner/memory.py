"""Memory of a rank at its peak: the fullest moment of a pass, and what stands beside it all along.

    bytes = max over moments (fixed + tokens * per_token
                + group tokens * (q_heads * per_q_head + kv_heads * per_kv_head)
                + receive buffers, while attention runs and where KV is exchanged)
            + communicators + what ranks reach at each other, in a group or in an exchange

Heads count over all the group's tokens: that is what the all-to-all makes of them. The moments are

    mlp       the last layer's MLP runs backward: activations of all layers stand
    next      the same of the layer before, while gradients of the last one are still reduced
    attention attention runs backward, over a rank's heads of all the group's tokens
    logits    a chunk of logits, and the float32 gradient of the output matrix
    end       no activations, but gradients of both matrices, and in float32 for their reduction

`fixed` counts evenly sharded states (FSDP2 shards evenly, over idle ranks too), embedding and
output matrix gathered for the whole pass, and a gathered layer with the next one on its way. FSDP2
gathers into buffers of its own stream and copies out of them, so both exist, and PyTorch's
allocator gives no stream what another has let go: states, gathers and the rest each count with
their own peak. Everything that comes and goes is raised by the allocator's slack.

In a node the all-to-all goes through buffers that the ranks of a group map at each other, all as
large as the rank with the most heads needs (`hexiseq_triton/peer_slots.py`):

    group tokens * (most q_heads * peer_per_q_head + most kv_heads * peer_per_kv_head) + peer_fixed

Both directions take turns in one buffer. Gradients of a KV head that several ranks of the group
hold are added up from there, in float32: then `peer_per_shared_kv_head` stands in its place.

What groups fetch of a rank stands in such buffers, too: its keys and values, and their gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hexiseq_triton.planner.logits import chunk_tokens
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.plans import Exchange
from hexiseq_triton.planner.problem import Problem
from hexiseq_triton.planner.rates import Floats
from hexiseq_triton.planner.rows import Rows, sums_by
from hexiseq_triton.planner.traffic import BF16, FLOAT32

STATE_BYTES = 4 * FLOAT32
"""A parameter, its gradient, and Adam's two moments."""
LOGIT_BYTES = 2 * BF16 + 2 * FLOAT32
"""The product and its log-probabilities, and those and the gradient of the chunk before."""
CONTEXT_BYTES = 1.5e9
"""CUDA's context and kernels; 1.2 to 1.5 GB on an H200."""
COMMUNICATOR_BYTES = 0.7e9
"""NCCL's buffers of one communicator, as measured on two H200. Each rank has one for all ranks; one
more where its group has several ranks, and one more where its replica has several groups."""
WORKSPACE_BYTES = 2 * (32 << 20)
"""What cuBLAS and cuBLASLt keep for themselves."""
FETCHERS = 2
"""Groups that fetch the same head of a rank at a time: they reach it one after the other, and the
next before the last is done where it has fewer tokens."""
PEER_GRANULE = 32 << 20
"""`peer_memory` takes each buffer in such steps."""
DELTA_BYTES = 8
"""What the buffers have room for in each row of delta, whatever its dtype."""
LARGEST_SLOT_BYTES = 1024
"""Of one head of one token: larger ones, and sizes other than powers of two, are sent."""
ALLOCATOR_SLACK = 0.05
"""Reserved but unused by PyTorch's allocator, whose segments can grow: `hexiseq_triton.init`
sets PYTORCH_ALLOC_CONF so unless it is set."""

MLP, ATTENTION = 0, 2
"""Two rows of `MemoryModel.moments`."""
FIXED, PER_TOKEN, PER_Q_HEAD, PER_KV_HEAD, BUFFERED = range(5)
"""Its columns; the last is 1 where receive buffers stand, else 0."""


@dataclass(frozen=True)
class MemoryModel:
    """The coefficients of the formulas above, in bytes; `moments` is [5, 5]."""

    moments: Floats
    communicator: float
    buffer_per_kv_head: float
    block_per_kv_head: float
    """A token's K and V, and its dK and dV, for one head: what baselines' exchanges buffer."""
    peer_per_q_head: float
    peer_per_kv_head: float
    peer_per_shared_kv_head: float
    """The same where ranks of the group share a KV head."""
    peer_fixed: float
    """Of each buffer."""

    @property
    def idle(self) -> float:
        """What a rank without tokens and heads holds."""
        return float(self.moments[:, FIXED].max())

    def whole_tokens(self, model: ModelSpec) -> Floats:
        """Return what a token takes with all its heads, at each moment."""
        heads = model.heads * self.moments[:, PER_Q_HEAD]
        result: Floats = (
            self.moments[:, PER_TOKEN] + heads + model.kv_heads * self.moments[:, PER_KV_HEAD]
        )
        return result

    def rank_bytes(self, rows: Rows, exchange: Exchange = "routes") -> Floats:
        """Return the peak of every row of a layout."""
        result: Floats = self.of_moments(rows, exchange).max(axis=0) + self.beside(rows, exchange)
        return result

    def of_moments(self, rows: Rows, exchange: Exchange = "routes") -> Floats:
        """Return [moments, rows], what tokens and heads take, and what is there anyway."""
        fixed, token, q_head, kv_head, buffered = self.moments.T[:, :, None]
        stream = sums_by(rows.replica, rows.group_tokens)[rows.replica]
        buffers = self.buffers(exchange, rows.group_tokens, stream) * np.ones(len(stream))
        heads = rows.q_heads * q_head + rows.kv_heads * kv_head
        held = fixed + rows.tokens * token + rows.group_tokens[rows.group] * heads
        received = rows.exchanges * rows.kv_heads * buffers[rows.group]
        result: Floats = held + buffered * received
        return result

    def beside(self, rows: Rows, exchange: Exchange = "routes") -> Floats:
        """Return what each row's communicators take, and what its peers reach."""
        lent = rows.kv_heads * self.block_per_kv_head * rows.group_tokens[rows.group]
        reached = (lent + 2 * self.peer_fixed) * (exchange == "routes")  # keys, and gradients
        exchanged = rows.exchanges * (self.communicator + reached)
        q_heads, kv_heads = rows.most(rows.q_heads), rows.most(rows.kv_heads)
        kv_head = np.where(rows.share_kv, self.peer_per_shared_kv_head, self.peer_per_kv_head)
        per_token = q_heads * self.peer_per_q_head + kv_heads * kv_head
        together = rows.group_sizes > 1
        peers = together * ~rows.spans_nodes * (rows.group_tokens * per_token + self.peer_fixed)
        shuffled = together * self.communicator + peers
        result: Floats = exchanged + shuffled[rows.group]
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
    """Return the peak of every rank of the world, idle ones too."""
    memory = memory_model(problem)
    used = np.full(problem.cluster.world_size, memory.idle)
    used[rows.rank] = memory.rank_bytes(rows, exchange)
    result: Floats = np.ceil(used)
    return result


_KEPT = "_memory_model"


def memory_model(problem: Problem) -> MemoryModel:
    """Return the coefficients for a model, workload and number of ranks."""
    known = vars(problem)  # asked for every layout: kept, as `cached_property` does
    if _KEPT not in known:
        known[_KEPT] = _memory_model(problem)
    found: MemoryModel = known[_KEPT]
    return found


def _memory_model(problem: Problem) -> MemoryModel:
    model, workload, exchange = problem.model, problem.workload, problem.exchange
    slack = 1 + ALLOCATOR_SLACK
    head_dim = model.head_dim
    states = STATE_BYTES * model.parameters / problem.cluster.world_size
    moments = _moments(problem)
    moments[:, FIXED] += states + WORKSPACE_BYTES + CONTEXT_BYTES + COMMUNICATOR_BYTES

    # two rounds: rows that arrive and their dk and dv, rows that leave and theirs, which return. A
    # round holds the chunks that begin in its window, so one more may reach out of it
    rows = min((exchange.window + 1) * exchange.chunk_tokens, workload.step_tokens)
    row = 2 * head_dim * (BF16 + FLOAT32)
    buffer = 2 * rows * row * (1 + FETCHERS)
    slot_bytes = BF16 * head_dim
    peers = slot_bytes <= LARGEST_SLOT_BYTES and slot_bytes & (slot_bytes - 1) == 0
    return MemoryModel(
        moments=moments,
        communicator=COMMUNICATOR_BYTES,
        buffer_per_kv_head=slack * buffer,
        block_per_kv_head=slack * 2 * head_dim * (BF16 + FLOAT32),
        # q, o, do or dq, and delta; k and v, or dk and dv
        peer_per_q_head=peers * (BF16 * head_dim + DELTA_BYTES),
        peer_per_kv_head=peers * 2 * BF16 * head_dim,
        peer_per_shared_kv_head=peers * 2 * FLOAT32 * head_dim,
        peer_fixed=peers * PEER_GRANULE,
    )


def _moments(problem: Problem) -> Floats:
    """Return the moments' coefficients, without states and contexts."""
    slack = 1 + ALLOCATOR_SLACK
    model, workload, world = problem.model, problem.workload, problem.cluster.world_size
    recomputes = workload.recompute == "full"
    layer, matrix = model.parameters_per_layer, model.vocab * model.hidden
    outside = matrix if model.tied else 2 * matrix
    # the embedding and the output matrix, and two layers, gathered; each rank's part of a layer as
    # it leaves; and copied out of that, both matrices and one layer
    gathered = BF16 * (2 * outside + 3 * layer + layer / world)
    grads, reduced = BF16 * layer, FLOAT32 * layer  # of one layer; what their reduction reads
    own = gathered + BF16 * matrix  # and the output matrix's gradient, which waits for the end
    chunk = min(chunk_tokens(model.vocab), workload.step_tokens)
    logits = chunk * model.vocab * LOGIT_BYTES + FLOAT32 * matrix

    # kept of each token: inputs of two norms, of q k v and MLP, of the output product, the MLP's;
    # its queries, keys and values
    hidden, width = BF16 * model.hidden, BF16 * model.heads * model.head_dim
    kv_width = 2 * BF16 * model.kv_heads * model.head_dim
    ffn = BF16 * model.ffn
    inner = (4 if model.gated else 2) * ffn
    kept = 4 * hidden + width + inner
    kept_q = BF16 * model.head_dim + FLOAT32  # and lse
    kept_kv = 2 * BF16 * model.head_dim
    before = model.layers - 1
    if recomputes:
        earlier, earlier_q, earlier_kv = hidden, 0.0, 0.0
    else:
        earlier, earlier_q, earlier_kv = kept, kept_q, kept_kv

    # of the MLP, the gradient of what is kept and one more, but one of the kept is gone
    mlp = kept + (2 if model.gated else 1) * ffn + hidden
    # of attention, MLP and second norm are done. Gradients of layer and output; dq, dk and dv, and
    # packed. Over heads: do and dq in bf16, delta and dq, dk and dv in float32
    attention = kept - inner - 2 * hidden + hidden + width + 2 * (width + kv_width)
    attention_q = kept_q + (2 * BF16 + FLOAT32) * model.head_dim + FLOAT32
    attention_kv = kept_kv + 2 * FLOAT32 * model.head_dim
    after = max(before - 1, 0)

    def at(fixed: float, token: float, q: float, kv: float, layers: int) -> list[float]:
        """Return a moment's coefficients, with what `layers` earlier layers keep."""
        kept_before = (layers * earlier, layers * earlier_q, layers * earlier_kv)
        return [fixed, *(a + b for a, b in zip((token, q, kv), kept_before, strict=True))]

    coefficients = np.array(
        [
            at(own + grads, mlp, kept_q, kept_kv, before),
            at(own + grads + reduced, mlp, kept_q, kept_kv, after),
            at(own + grads + reduced, attention, attention_q, attention_kv, after),
            at(own + logits, 2 * hidden, 0.0, 0.0, model.layers),
            at(gathered + (BF16 + FLOAT32) * outside + reduced, 0.0, 0.0, 0.0, 0),
        ]
    )
    return np.hstack([slack * coefficients, np.eye(len(coefficients))[:, ATTENTION, None]])
