"""What a layout costs: seconds of a step, seconds and bytes of every rank.

The all-to-all synchronises a group, so one layer of group g takes, forward and backward each,

    max over ranks (token-wise) + all-to-all + max over ranks (attention with its KV exchange)
                                + all-to-all

and the layer takes as long as its slowest group. A group of one has no all-to-all. Attention and
exchange overlap: the longer of the two counts, and the part of the first chunk's transfer that the
group's own tokens cannot hide. FSDP's gathers and reduce-scatters run beside the layer and count
where they are longer; the two share a NIC, which is not modelled.

Balanced causal work of group g is L_g (N + 1) / 2 pairs for each head, full attention L_g N. A
contiguous arrangement is charged what its segments really see.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hexiseq_triton.planner.memory import memory_model
from hexiseq_triton.planner.problem import Layout, Problem, Work
from hexiseq_triton.planner.rates import Floats
from hexiseq_triton.planner.traffic import (
    GRADIENT_BYTES,
    Ports,
    Rows,
    all_to_all,
    fetched_tokens,
    kv_exchange,
)
from hexiseq_triton.segments import CAUSAL, FULL, cut, visible_pairs, whole_documents

OPTIMIZER_BYTES = 28
"""Adam reads parameter, gradient and two moments, and writes all but the gradient, in float32."""


@dataclass(frozen=True)
class Cost:
    """A layout's prediction. Rank arrays are indexed by rank."""

    layout: Layout
    step_seconds: float
    group_seconds: Floats
    """One layer, forward and backward, of each group."""
    busy_seconds: Floats
    """A rank's own computing in one step."""
    memory_bytes: Floats
    memory_limit: Floats

    @property
    def fits(self) -> bool:
        return bool((self.memory_bytes <= self.memory_limit).all())

    @property
    def fullest_rank(self) -> int:
        return int(np.argmax(self.memory_bytes / self.memory_limit))


@dataclass(frozen=True)
class _Phases:
    """Seconds of one layer, arrays over rows: computing, and attention with its exchange."""

    linear: Floats
    attention_busy: Floats
    attention: Floats


def evaluate(problem: Problem, layout: Layout) -> Cost:
    """Return what `layout` costs; it may exceed memory, which `Cost.fits` tells."""
    rows = Rows.of(problem, layout)
    forward, backward = _phases(problem, layout, rows)
    shuffle = _all_to_all_seconds(problem, rows)

    group_forward = rows.most(forward.linear) + shuffle + rows.most(forward.attention)
    group_backward = rows.most(backward.linear) + shuffle + rows.most(backward.attention)
    if problem.workload.recompute == "full":
        group_backward = group_backward + group_forward
    gather, reduce_scatter = fsdp_seconds(problem)
    layer = max(group_forward.max(), gather) + max(group_backward.max(), gather + reduce_scatter)

    logits = (1 + Work.BACKWARD_LINEAR) * problem.work.logits_per_token * rows.tokens
    logits = logits / problem.rates.gemm[rows.rank]
    one_pass = problem.model.layers * layer + logits.max()
    step = problem.workload.accumulation * one_pass + optimizer_seconds(problem).max()
    used = np.zeros(problem.cluster.world_size)
    used[rows.rank] = np.ceil(memory_model(problem).rank_bytes(rows))
    return Cost(
        layout=layout,
        step_seconds=float(step),
        group_seconds=group_forward + group_backward,
        busy_seconds=_busy_seconds(problem, rows, forward, backward, logits),
        memory_bytes=used,
        memory_limit=problem.rates.memory_limit,
    )


def _busy_seconds(
    problem: Problem, rows: Rows, forward: _Phases, backward: _Phases, logits: Floats
) -> Floats:
    """Return what each rank computes in one step, waiting and transfers left out."""
    workload = problem.workload
    again = 2 if workload.recompute == "full" else 1
    layer = again * (forward.linear + forward.attention_busy)
    layer = layer + backward.linear + backward.attention_busy
    busy = optimizer_seconds(problem)
    busy[rows.rank] += workload.accumulation * (problem.model.layers * layer + logits)
    return busy


def optimizer_seconds(problem: Problem) -> Floats:
    """Return the optimizer's seconds on each rank; states are sharded evenly."""
    num_bytes = OPTIMIZER_BYTES * problem.model.parameters / problem.cluster.world_size
    result: Floats = num_bytes / problem.rates.memory
    return result


def _phases(problem: Problem, layout: Layout, rows: Rows) -> tuple[_Phases, _Phases]:
    """Return the forward and the backward phase of one layer."""
    rates, work = problem.rates, problem.work
    linear = work.linear_per_token * rows.tokens / rates.gemm[rows.rank]
    attention = work.attention_per_pair * rows.q_heads * _pairs(problem, layout, rows)[rows.group]
    fetched = fetched_tokens(problem, layout, rows)
    ports = kv_exchange(problem, rows, fetched)
    # KV is fetched again in backward, and every fetch is answered by its dK and dV
    returned = ports.with_returns(GRADIENT_BYTES / 2)

    phases = []
    for times, rate, traffic, linear_times in (
        (1.0, rates.attention_forward, ports, 1.0),
        (Work.BACKWARD_ATTENTION, rates.attention_backward, returned, Work.BACKWARD_LINEAR),
    ):
        busy = times * attention / rate[rows.rank]
        exchanged = busy
        if len(layout.groups) > 1:
            exchanged = _overlapped(problem, rows, busy, fetched, traffic)
        phases.append(_Phases(linear_times * linear, busy, exchanged))
    return phases[0], phases[1]


def _pairs(problem: Problem, layout: Layout, rows: Rows) -> Floats:
    """Return the (query, key) pairs of each group, for one head."""
    workload = problem.workload
    if layout.arrangement == "balanced":
        return rows.group_tokens * workload.pairs_per_token
    documents = whole_documents([workload.seq_len] * workload.sequences)
    runs = cut(documents, [group.num_tokens for group in layout.groups])
    mask = CAUSAL if workload.causal else FULL
    return np.array([visible_pairs(run, documents, mask) for run in runs], dtype=float)


def _overlapped(
    problem: Problem, rows: Rows, busy: Floats, fetched: Floats, ports: Ports
) -> Floats:
    """Return seconds of attention with its exchange: the longer one, and the exposed start."""
    rates, exchange = problem.rates, problem.exchange
    cuts = np.unique(rows.kv_ranges)
    intervals = np.searchsorted(cuts, rows.kv_ranges)
    chunks = np.ceil(fetched / exchange.chunk_tokens).sum(axis=1)[rows.group]
    chunks = chunks * (intervals[:, 1] - intervals[:, 0])
    far = ports.in_across + ports.out_across > 0
    latency = np.where(far, rates.across_latency[rows.rank], rates.in_node_latency[rows.rank])

    moving = ports.seconds(rates.in_node[rows.rank], rates.across[rows.rank])
    moving = moving + latency * chunks / exchange.window
    own_share = rows.group_tokens / rows.group_tokens.sum()
    first = np.divide(moving, chunks, out=np.zeros_like(moving), where=chunks > 0)
    exposed = np.maximum(0.0, first - busy * own_share[rows.group])
    result: Floats = np.maximum(busy, moving) + exposed
    return result


def _all_to_all_seconds(problem: Problem, rows: Rows) -> Floats:
    """Return each group's all-to-alls of one layer: q, k and v in, o out; backward's are alike."""
    rates = problem.rates
    spans = (rows.by_group_and_node(np.ones(len(rows.rank))) > 0).sum(axis=1)[rows.group] > 1
    latency = np.where(spans, rates.across_latency[rows.rank], rates.in_node_latency[rows.rank])
    seconds = np.zeros(len(rows.group_starts))
    for heads in (rows.q_heads + 2 * rows.kv_heads, rows.q_heads):
        ports = all_to_all(problem, rows, heads)
        moving = ports.seconds(rates.in_node[rows.rank], rates.across_all_to_all[rows.rank])
        seconds += rows.most(moving + latency)
    result: Floats = np.where(rows.group_sizes > 1, seconds, 0.0)
    return result


def fsdp_seconds(problem: Problem) -> tuple[float, float]:
    """Return seconds to gather one layer's parameters, and to reduce-scatter its gradients.

    Every rank passes on all shards but its own inside the node; a node's NICs together take in
    what other nodes hold.
    """
    world, rates = problem.cluster.world_size, problem.rates
    if world == 1:
        return 0.0, 0.0
    sizes = np.bincount(rates.node)
    seconds = 0.0
    if sizes.max() > 1:
        seconds = float(((world - 1) / world / rates.in_node[sizes[rates.node] > 1]).max())
    if len(sizes) > 1:
        node_rates = np.bincount(rates.node, weights=rates.across)
        seconds = max(seconds, float(((world - sizes) / world / node_rates).max()))
    return (
        2 * problem.model.parameters_per_layer * seconds,
        GRADIENT_BYTES * problem.model.parameters_per_layer * seconds,
    )
