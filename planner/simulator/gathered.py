"""All keys and values gathered before attention, their gradients reduced after it.

What Megatron's all-gather does: nothing travels while attention computes. A node's NICs share what
comes from outside.
"""

from __future__ import annotations

import numpy as np

from hexiseq_triton.planner.exchange import ANSWER
from hexiseq_triton.planner.rates import Ints
from hexiseq_triton.planner.rows import sums_by
from hexiseq_triton.planner.simulator.attention import Attention
from hexiseq_triton.planner.simulator.graph import GRADIENTS, KEYS


def gathered(attention: Attention) -> Ints:
    """Add one replica's attention; return what its rows wait for at the end."""
    builder, view = attention.builder, attention.view
    gather, computing = builder.take(1), builder.take(len(view.rank))
    builder.after(gather, attention.begin)
    _collective(attention, gather, KEYS, 1.0)
    builder.after(computing, gather)
    attention.compute(computing, attention.slowed(), np.ones(1))
    if not attention.backward:
        return computing
    reduce = builder.take(1)
    builder.after(reduce, computing)
    _collective(attention, reduce, GRADIENTS, ANSWER)
    return np.broadcast_to(reduce, computing.shape)


def _collective(attention: Attention, op: Ints, kind: int, times: float) -> None:
    view, links = attention.view, attention.links
    node = links.rates.node[view.rank]
    heads = np.diff(view.kv_ranges, axis=1)[:, 0]
    block = times * view.bytes_per_token * view.tokens[view.group] * heads
    near, ranks = sums_by(node, block)[node], np.bincount(node)[node]
    everything = block.sum()
    inside = np.where(ranks > 1, everything - block, 0.0)
    uses = links.in_rings(view.rank, inside, (everything - near) / ranks)
    rates = links.rates
    far = near < everything
    latency = np.where(far, rates.across_latency[view.rank], rates.in_node_latency[view.rank]).max()
    attention.builder.collective(op, kind, latency, uses._replace(at=0 * uses.at))
