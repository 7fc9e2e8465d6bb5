"""Recheck the split inside each group with python-mip's CBC, from the plan as complete start.

A group's tokens L and pairs, and all other groups, are held as the plan has them. The model relaxes
the cost model, so that what CBC proves holds for every split of the group. With r over its ranks,

minimise    times * (token_wise_f + shuffle_f + attention_f)           [seconds, scaled to 100]
            + token_wise_b + shuffle_b + attention_b
subject to  seconds_per_token[r] * tokens[r] <= token_wise             for f and b
            seconds_per_head[r] * heads[r] <= attention                for f and b
            seconds_per_kv_head[r] * kv_heads[r] <= attention          for f and b
            (all_widths * tokens[r] - both[r]) / port[r] <= shuffle    for f and b
            (L * width[r] - both[r]) / port[r] <= shuffle              for f and b
            both[r] <= most_tokens[r] * width[r]
            both[r] <= most_width[r] * tokens[r]
            bytes(tokens[r], heads[r], kv_heads[r]) <= room[r]
            sum tokens[r] = L,  sum heads[r] = num_heads,  heads[r] <= q_per_kv * kv_heads[r]
            tokens, heads, kv_heads integer

`times` is how often a layer runs forward, `width` the bytes that a rank's heads take for one token,
and `both` stands for tokens times width. `most_tokens` and `most_width` are what a rank can have in
a split no slower than the plan's. A head costs attention and what the exchange beside it slows it
by. Ports are taken together where a group spans nodes, and latency is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from hexiseq_triton.planner.cost import Cost
from hexiseq_triton.planner.logits import logits_seconds_per_token
from hexiseq_triton.planner.memory import BUFFERED, FIXED, PER_TOKEN, memory_model
from hexiseq_triton.planner.problem import Work
from hexiseq_triton.planner.rates import Floats, Ints
from hexiseq_triton.planner.sight import sight_of
from hexiseq_triton.planner.traffic import BF16, FLOAT32

_MAX_NODES = 2000
_SCALE = 100.0


@dataclass(frozen=True)
class Certificate:
    """What CBC proved of one group: no split of its tokens and heads beats `proved_seconds`.

    Seconds are of one layer, forward and backward, as often as each runs.
    """

    replica: int
    group: int
    seconds: float
    """The plan's."""
    proved_seconds: float

    @property
    def gap(self) -> float:
        """How much longer than what is proved, as a share of it."""
        return self.seconds / self.proved_seconds - 1

    def __str__(self) -> str:
        return (
            f"replica {self.replica}, group {self.group}: {self.seconds:.4g} s a layer; no other "
            f"split of its tokens and heads takes less than {self.proved_seconds:.4g} s "
            f"({self.gap:.2%})"
        )


def certify(cost: Cost) -> list[Certificate]:
    """Return what can be proved of the split inside each group of a layout, in its order.

    Groups that are alike are proved once, and a group of one has only one split. The cost of a plan
    comes from `explain.cost_of`.

    Raises:
        ImportError: if python-mip is not installed.
    """
    proved: dict[tuple[bytes, ...], float] = {}
    certificates = []
    for g, replica in enumerate(cost.rows.replica.tolist()):
        split = _Split.of(cost, g)
        if split.key not in proved:
            proved[split.key] = _proved(split)
        first = int(np.argmax(cost.rows.replica == replica))
        certificates.append(Certificate(replica, g - first, split.seconds, proved[split.key]))
    return certificates


@dataclass(frozen=True)
class _Split:
    """One group as numbers: arrays are [ranks], or [2, ranks] for forward and backward."""

    tokens: Ints
    heads: Ints
    kv_heads: Ints
    seconds: float
    times: int
    q_per_kv: int
    num_kv_heads: int
    per_token: Floats
    per_head: Floats
    per_kv_head: Floats
    widths: Floats
    """[2, 2]: bytes that a query head and a KV head take for one token, forward and backward."""
    port: Floats
    """Bytes a second."""
    room: Floats
    """[moments, ranks]: bytes for tokens and heads."""
    bytes_each: Floats
    """[moments, 3]: of a token, and of a query head and a KV head over the group's tokens."""

    @classmethod
    def of(cls, cost: Cost, g: int) -> _Split:
        problem, rows = cost.problem, cost.rows
        rates, work, model = problem.rates, problem.work, problem.model
        mine = rows.group == g
        rank, tokens = rows.rank[mine], rows.group_tokens[g]
        logits = cost.logits_seconds[mine].max() / model.layers
        linear = work.linear_per_token * np.stack(
            [1 / rates.gemm_forward[rank], Work.BACKWARD_LINEAR / rates.gemm_backward[rank]]
        )
        linear[1] += logits_seconds_per_token(problem)[rank] / model.layers
        sight = sight_of(problem, cost.layout, rows)
        head = work.attention_per_pair * sight.pairs[g]
        head = head * np.stack(
            [
                1 / rates.attention_forward[rank],
                Work.BACKWARD_ATTENTION / rates.attention_backward[rank],
            ]
        )
        fetched = 2 * BF16 * model.head_dim * sight.fetches.received()[g]
        # in backward dK and dV, twice as many bytes, go out the same way
        kv_head = fetched * np.array([[1.0], [2.0]]) / _ingress(cost, g)
        q_per_kv = model.heads // model.kv_heads
        slowdown = rates.overlap.compute_slowdown
        slowed = head + slowdown * np.minimum(head, kv_head / q_per_kv)
        memory = memory_model(problem)
        buffers = memory.buffer_per_kv_head * rows.exchanges[mine][0]
        return cls(
            tokens=rows.tokens[mine].astype(np.int64),
            heads=rows.q_heads[mine].astype(np.int64),
            kv_heads=rows.kv_heads[mine].astype(np.int64),
            seconds=float(cost.group_seconds[g] + logits),
            times=2 if problem.workload.recompute == "full" else 1,
            q_per_kv=q_per_kv,
            num_kv_heads=model.kv_heads,
            per_token=linear,
            per_head=slowed,
            per_kv_head=kv_head,
            widths=np.array(
                [
                    [2 * BF16 * model.head_dim, 2 * BF16 * model.head_dim],
                    [2 * BF16 * model.head_dim + FLOAT32, 2 * FLOAT32 * model.head_dim],
                ]
            ),
            port=_shuffle_port(cost, g),
            room=rates.memory_limit[rank] - memory.moments[:, FIXED, None],
            bytes_each=memory.moments[:, PER_TOKEN:BUFFERED] * np.array([1.0, tokens, tokens])
            + memory.moments[:, BUFFERED, None] * np.array([0.0, 0.0, buffers]),
        )

    @property
    def key(self) -> tuple[bytes, ...]:
        """Equal for groups that are alike."""
        return tuple(np.asarray(getattr(self, field.name)).tobytes() for field in fields(self))

    def most(self) -> tuple[Floats, Floats]:
        """Return the most tokens and heads of each rank in a split no slower than the plan's."""
        counts = np.array([[self.times], [1]])
        token, head = (counts * self.per_token).sum(axis=0), (counts * self.per_head).sum(axis=0)
        least_token = self.tokens.sum() / (1 / token).sum()
        least_head = self.heads.sum() / (1 / head).sum()
        return (self.seconds - least_head) / token, (self.seconds - least_token) / head


def _ingress(cost: Cost, g: int) -> Floats:
    """Return bytes/s at which KV can reach each rank of a group, over all its ports that serve."""
    rows, rates = cost.rows, cost.problem.rates
    mine = rows.group == g
    rank, node = rows.rank[mine], rows.node[mine]
    others = (rows.replica[rows.group] == rows.replica[g]) & ~mine
    near = np.isin(node, rows.node[others])
    both = np.where(rates.shares_port[rank], rates.in_node[rank], np.inf)
    result: Floats = np.minimum(rates.across[rank] + near * rates.in_node[rank], both)
    return result


def _shuffle_port(cost: Cost, g: int) -> Floats:
    """Return bytes/s of each rank of a group in an all-to-all, over all its ports that serve."""
    rows, rates = cost.rows, cost.problem.rates
    rank, node = rows.rank[rows.group == g], rows.node[rows.group == g]
    same = node[:, None] == node
    near, far = same.sum(axis=1) > 1, ~same.all(axis=1)
    both = np.where(rates.shares_port[rank], rates.in_node[rank], np.inf)
    port = near * rates.in_node[rank] + far * rates.across_all_to_all[rank]
    result: Floats = np.where(port > 0, np.minimum(port, both), np.inf)
    return result


def _proved(split: _Split) -> float:
    """Return the least seconds of the model above that CBC cannot rule out."""
    if len(split.tokens) == 1:
        return split.seconds
    from mip import CBC, INTEGER, Model, OptimizationStatus, minimize, xsum  # slow to import

    model = Model(solver_name=CBC)
    model.verbose = 0
    model.threads = 1
    model.max_mip_gap = 1e-5
    scale, count = _SCALE / split.seconds, len(split.tokens)
    most_tokens, most_heads = split.most()
    kv_most = np.minimum(split.num_kv_heads, np.ceil(most_heads / split.q_per_kv) + 1)

    held = (("tokens", split.tokens), ("heads", split.heads), ("kv_heads", split.kv_heads))
    tokens, heads, kv_heads = (
        [model.add_var(f"{name}_{r}", var_type=INTEGER) for r in range(count)] for name, _ in held
    )
    start = [
        (var, float(value))
        for names, (_, values) in zip((tokens, heads, kv_heads), held, strict=True)
        for var, value in zip(names, values.tolist(), strict=True)
    ]
    unit = np.abs(split.room).max()
    for r in range(count):
        model += heads[r] <= split.q_per_kv * kv_heads[r], f"kv_head_of_every_head_{r}"
        here = tokens[r], heads[r], kv_heads[r]
        for m, (each, room) in enumerate(zip(split.bytes_each, split.room[:, r], strict=True)):
            used = xsum(size * var for size, var in zip(each / unit, here, strict=True))
            model += used <= room / unit, f"memory_{m}_{r}"
    model += xsum(tokens) == int(split.tokens.sum()), "all_tokens"
    model += xsum(heads) == int(split.heads.sum()), "all_heads"

    total = 0.0
    for d, times in enumerate((split.times, 1)):
        phases = [model.add_var(f"{name}_{d}") for name in ("token_wise", "shuffle", "attention")]
        token_wise, shuffle, attention = phases
        q_width, kv_width = split.widths[d] / split.widths[d].sum()
        all_widths = q_width * split.heads.sum() + kv_width * split.num_kv_heads
        port = scale * split.widths[d].sum() / split.port
        for r in range(count):
            model += scale * split.per_token[d, r] * tokens[r] <= token_wise, f"token_wise_{d}_{r}"
            model += scale * split.per_head[d, r] * heads[r] <= attention, f"attention_{d}_{r}"
            model += scale * split.per_kv_head[d, r] * kv_heads[r] <= attention, f"fetch_{d}_{r}"
            both = model.add_var(f"both_{d}_{r}")
            width = q_width * heads[r] + kv_width * kv_heads[r]
            most_width = q_width * most_heads[r] + kv_width * kv_most[r]
            model += both <= most_tokens[r] * width, f"both_by_tokens_{d}_{r}"
            model += both <= most_width * tokens[r], f"both_by_width_{d}_{r}"
            model += port[r] * (all_widths * tokens[r] - both) <= shuffle, f"out_{d}_{r}"
            whole = int(split.tokens.sum())
            model += port[r] * (whole * width - both) <= shuffle, f"in_{d}_{r}"
        total = total + times * xsum(phases)
    model.objective = minimize(total)
    model.start = start
    if model.optimize(max_nodes=_MAX_NODES) is OptimizationStatus.INFEASIBLE:
        return split.seconds  # the group's memory holds no split at all
    return min(float(model.objective_bound) / scale, split.seconds)
