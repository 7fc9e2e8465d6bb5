"""Memory of a rank at its peak: what stays for the whole step, and the fullest layer.

    bytes = fixed + tokens * per_token + group tokens * (q_heads * per_q_head + kv_heads * per_kv)

`fixed` counts evenly sharded states (FSDP2 shards evenly), two gathered layers with one layer's
gradients, the gathered embedding or output matrix, receive buffers and a chunk of logits. Half
precision is 2 bytes. Everything that comes and goes is raised by the allocator's slack.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hexiseq_triton.planner.problem import Problem
from hexiseq_triton.planner.rates import Floats
from hexiseq_triton.planner.traffic import Rows

STATE_BYTES = 16
"""A parameter in float32, its gradient, and Adam's two moments."""
LOGITS_CHUNK_TOKENS = 2048
CONTEXT_BYTES = 1e9
"""CUDA context, communicators and code; assumed."""
ALLOCATOR_SLACK = 0.08
"""Reserved but unused by PyTorch's allocator; reports lie between 6 and 10 %."""


@dataclass(frozen=True)
class MemoryModel:
    """The coefficients of the formula above, in bytes."""

    fixed: float
    per_token: float
    per_q_head: float
    per_kv_head: float
    buffer_per_kv_head: float

    def rank_bytes(self, rows: Rows) -> Floats:
        """Return the peak of every rank of a layout."""
        return self.head_bytes(rows) + self.fixed + self.per_token * rows.tokens

    def head_bytes(self, rows: Rows) -> Floats:
        """Return what a rank's heads take: group tokens by heads, and receive buffers."""
        per_token = rows.q_heads * self.per_q_head + rows.kv_heads * self.per_kv_head
        result: Floats = rows.group_tokens[rows.group] * per_token
        if len(rows.group_starts) > 1:
            result = result + rows.kv_heads * self.buffer_per_kv_head
        return result


def memory_model(problem: Problem) -> MemoryModel:
    """Return the coefficients for a model, workload and number of ranks."""
    model, workload, exchange = problem.model, problem.workload, problem.exchange
    slack = 1 + ALLOCATOR_SLACK
    head_dim, layers = model.head_dim, model.layers
    saved_layers = layers if workload.recompute == "none" else 1

    states = STATE_BYTES * model.parameters / problem.cluster.world_size
    gathered = (2 * 2 + 4) * model.parameters_per_layer + 2 * model.vocab * model.hidden
    logits = min(LOGITS_CHUNK_TOKENS, workload.stream_tokens) * model.vocab * (2 + 4)

    # saved for backward: two norms' and two residuals' inputs, q k v o, the MLP's inner rows
    inner = (3 if model.gated else 2) * model.ffn
    token_wise = 2 * (5 * model.hidden + 2 * (model.heads + model.kv_heads) * head_dim + inner)
    boundary = 2 * model.hidden * layers

    # after the all-to-all, saved: q and o (o only while its layer runs), lse; k, v
    # while backward runs: do in half precision, dq, dk and dv in float32
    q_head = saved_layers * (2 * head_dim + 4) + head_dim * (2 + 2 + 4)
    kv_head = saved_layers * 2 * 2 * head_dim + 2 * 4 * head_dim
    rows_in_flight = min(exchange.window * exchange.chunk_tokens, workload.stream_tokens)
    return MemoryModel(
        fixed=states + CONTEXT_BYTES + slack * (gathered + logits),
        per_token=slack * (boundary + saved_layers * token_wise),
        per_q_head=slack * q_head,
        per_kv_head=slack * kv_head,
        buffer_per_kv_head=slack * rows_in_flight * 2 * (2 + 4) * head_dim,
    )


def group_token_caps(problem: Problem, memory: MemoryModel, rows: Rows) -> Floats:
    """Return the most tokens each group can hold together with its heads.

    Both each rank's heads over all L tokens must fit, and the L tokens into what then is left:
    sum over ranks of (room - L * heads) >= L * per_token.
    """
    none = replace(rows, group_tokens=np.zeros(len(rows.group_starts)))
    room = problem.rates.memory_limit[rows.rank] - memory.fixed - memory.head_bytes(none)
    heads = rows.q_heads * memory.per_q_head + rows.kv_heads * memory.per_kv_head
    together = np.add.reduceat(room, rows.group_starts)
    together = together / (memory.per_token + np.add.reduceat(heads, rows.group_starts))
    alone = -rows.most(-room / np.maximum(heads, 1.0))
    result: Floats = np.floor(np.maximum(0.0, np.minimum(together, alone)))
    return result


def token_caps(problem: Problem, memory: MemoryModel, rows: Rows) -> Floats:
    """Return the most tokens each rank can hold beside its heads; negative if the heads don't fit.

    `rows` gives heads and group tokens; its own tokens are not looked at.
    """
    left = problem.rates.memory_limit[rows.rank] - memory.fixed - memory.head_bytes(rows)
    result: Floats = np.floor(left / memory.per_token)
    return result
