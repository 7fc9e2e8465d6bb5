"""The best layout of a tiny problem, by looking at all of them.

Ranks may be idle or in any group of any replica, replicas may have any sequences, groups any
nesting order and ranks any order in their group, tokens come in units and heads one by one, and
both arrangements are tried. Nothing is shared with the search; the evaluator judges.

Most layouts need no evaluation: `least_seconds` gives, for all tokens and heads of a structure at
once, seconds that the evaluator cannot fall below. Layouts are evaluated by rising least seconds,
until these reach the best step found.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, permutations, product
from typing import Literal

import numpy as np

from hexiseq_triton.planner.cost import Cost, evaluate
from hexiseq_triton.planner.fsdp import boundary_seconds, fsdp_seconds, optimizer_seconds
from hexiseq_triton.planner.logits import logits_seconds_per_token
from hexiseq_triton.planner.memory import memory_model
from hexiseq_triton.planner.problem import Group, Layout, Problem, Replica, Work
from hexiseq_triton.planner.rates import Floats, Ints, together

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Structure:
    """Who works with whom: for each replica its groups in nesting order, and its sequences."""

    replicas: tuple[tuple[Ranks, ...], ...]
    sequences: tuple[int, ...]
    accumulation: int
    arrangement: Literal["balanced", "contiguous"]

    @property
    def groups(self) -> list[Ranks]:
        return [group for replica in self.replicas for group in replica]


@dataclass(frozen=True)
class Choices:
    """All tokens and heads of a structure: [choices, used ranks], ranks in group order."""

    structure: Structure
    tokens: Ints
    heads: Ints

    def layouts(self, index: int) -> Iterator[Layout]:
        """Yield the layouts of one choice: the ranks of each group in every order."""
        shares = zip(self.tokens[index].tolist(), self.heads[index].tolist(), strict=True)
        groups = [[(rank, *next(shares)) for rank in ranks] for ranks in self.structure.groups]
        for orders in product(*(permutations(group) for group in groups)):
            made = iter([Group(*zip(*order, strict=True)) for order in orders])
            replicas = tuple(
                Replica(tuple(next(made) for _ in groups), sequences)
                for groups, sequences in zip(
                    self.structure.replicas, self.structure.sequences, strict=True
                )
            )
            yield Layout("", replicas, self.structure.accumulation, self.structure.arrangement)


def best_layout(problem: Problem, unit: int, below: float = math.inf) -> Cost | None:
    """Return the fastest layout that fits in memory and is faster than `below` seconds."""
    batches = [choices(problem, structure, unit) for structure in structures(problem)]
    least = [least_seconds(problem, batch) for batch in batches]
    places = [(batch, index) for batch in range(len(batches)) for index in range(len(least[batch]))]
    by_least = np.concatenate(least)
    best = None
    for place in np.argsort(by_least, kind="stable").tolist():
        if by_least[place] >= below:
            break
        batch, index = places[place]
        for layout in batches[batch].layouts(index):
            cost = evaluate(problem, layout)
            if cost.fits and cost.step_seconds < below:
                best, below = cost, cost.step_seconds
    return best


def structures(problem: Problem) -> Iterator[Structure]:
    """Yield every way of putting some ranks into replicas, and those of a replica into groups."""
    workload, world = problem.workload, problem.cluster.world_size
    for accumulation in workload.accumulations:
        sequences = workload.global_batch // accumulation
        for size in range(1, world + 1):
            for used in combinations(range(world), size):
                for parts in _partitions(used):
                    for shares in _compositions(sequences, len(parts)).tolist():
                        if 0 in shares:
                            continue
                        for replicas in product(*(_ordered_partitions(part) for part in parts)):
                            single = all(len(groups) == 1 for groups in replicas)
                            yield Structure(replicas, tuple(shares), accumulation, "balanced")
                            if not single:
                                yield Structure(replicas, tuple(shares), accumulation, "contiguous")


@cache
def _partitions(ranks: Ranks) -> list[tuple[Ranks, ...]]:
    """Return all ways of cutting a set of ranks into sets."""
    if not ranks:
        return [()]
    first, rest = ranks[0], ranks[1:]
    found = []
    for size in range(len(rest) + 1):
        for others in combinations(rest, size):
            left = tuple(rank for rank in rest if rank not in others)
            found += [((first, *others), *parts) for parts in _partitions(left)]
    return found


@cache
def _ordered_partitions(ranks: Ranks) -> list[tuple[Ranks, ...]]:
    return [order for parts in _partitions(ranks) for order in permutations(parts)]


@cache
def _compositions(total: int, count: int) -> Ints:
    """Return all rows of `count` numbers from 0 that add up to `total`."""
    if count == 1:
        return np.array([[total]])
    rows = []
    for first in range(total + 1):
        rest = _compositions(total - first, count - 1)
        rows.append(np.concatenate([np.full((len(rest), 1), first), rest], axis=1))
    return np.concatenate(rows)


def choices(problem: Problem, structure: Structure, unit: int) -> Choices:
    """Return all tokens, in units, and all heads of a structure."""
    units, rest = divmod(problem.workload.seq_len, unit)
    assert not rest, "tiny sequences are whole units"
    tokens = [
        unit * _compositions(sequences * units, sum(len(group) for group in groups))
        for groups, sequences in zip(structure.replicas, structure.sequences, strict=True)
    ]
    heads = [_compositions(problem.model.heads, len(group)) for group in structure.groups]
    all_tokens, all_heads = _rows_of_all(tokens), _rows_of_all(heads)
    return Choices(
        structure,
        np.repeat(all_tokens, len(all_heads), axis=0),
        np.tile(all_heads, (len(all_tokens), 1)),
    )


def _rows_of_all(tables: Sequence[Ints]) -> Ints:
    """Return every choice of one row of each table, side by side."""
    result = tables[0]
    for table in tables[1:]:
        repeated = np.repeat(result, len(table), axis=0)
        result = np.concatenate([repeated, np.tile(table, (len(result), 1))], axis=1)
    return result


def least_seconds(problem: Problem, batch: Choices) -> Floats:
    """Return for each choice seconds that the evaluator's step cannot fall below.

    Computing is counted in full, transfers without latency, for the fewest KV heads that a rank's
    query heads can need, and the exchange through all of a rank's ports together. Infinite where a
    rank's tokens and heads alone take more than its memory.
    """
    work, workload = problem.work, problem.workload
    forward, backward, logits, over = [], [], [], []
    start = 0
    for (ranks, others), pairs in zip(
        _groups_with_others(problem, batch), _pairs(problem, batch), strict=True
    ):
        rank = list(ranks)
        columns = slice(start, start + len(rank))
        start += len(rank)
        tokens, heads = batch.tokens[:, columns], batch.heads[:, columns]
        rates = problem.rates
        used = _bytes(problem, tokens, heads, exchanges=(ranks,) not in batch.structure.replicas)
        over.append((used > rates.memory_limit[rank]).any(axis=1))
        shuffle = _all_to_all(problem, rank, tokens, heads)
        fetch = _fetch(problem, rank, heads, others)
        linear = work.linear_per_token * tokens
        attention = work.attention_per_pair * heads * pairs[:, None]
        for directions, linear_times, attention_times, gemm, attention_rate in (
            (forward, 1.0, 1.0, rates.gemm_forward, rates.attention_forward),
            (
                backward,
                Work.BACKWARD_LINEAR,
                Work.BACKWARD_ATTENTION,
                rates.gemm_backward,
                rates.attention_backward,
            ),
        ):
            busy = attention_times * attention / attention_rate[rank]
            exchanged = np.maximum(*together(busy, fetch)).max(axis=1)
            token_wise = (linear_times * linear / gemm[rank]).max(axis=1)
            directions.append(token_wise + shuffle + exchanged)
        logits.append((tokens * logits_seconds_per_token(problem)[rank]).max(axis=1))
    again = 1 if workload.recompute == "full" else 0
    second = [again * f + b for f, b in zip(forward, backward, strict=True)]
    gather, reduce_scatter = fsdp_seconds(problem)
    layer = np.maximum(*together(np.max(forward, axis=0), gather))
    layer = layer + np.maximum(*together(np.max(second, axis=0), gather + reduce_scatter))
    one_pass = problem.model.layers * layer + np.max(logits, axis=0)
    one_pass += boundary_seconds(problem)
    step = batch.structure.accumulation * one_pass + optimizer_seconds(problem).max()
    result: Floats = np.where(np.any(over, axis=0), math.inf, step)
    return result


def _all_to_all(problem: Problem, rank: list[int], tokens: Ints, heads: Ints) -> Floats:
    """Return [choices]: q, k and v in and o out of one layer, by the fullest port."""
    if len(rank) == 1:
        return np.zeros(len(tokens))
    rates = problem.rates
    near = (rates.node[rank][:, None] == rates.node[rank]) & ~np.eye(len(rank), dtype=bool)
    far = rates.node[rank][:, None] != rates.node[rank]
    seconds = np.zeros(len(tokens))
    for width in (heads + 2 * _kv_heads(problem, heads), heads):
        ports = [
            np.maximum(tokens * (width @ peers), width * (tokens @ peers)) / port[rank]
            for peers, port in ((near, rates.in_node), (far, rates.across_all_to_all))
        ]
        seconds += 2 * problem.model.head_dim * np.max(ports, axis=(0, 2))
    return seconds


def _bytes(problem: Problem, tokens: Ints, heads: Ints, exchanges: bool) -> Floats:
    """Return [choices, ranks]: memory of tokens and of the fewest KV heads for the query heads."""
    memory, kv_heads = memory_model(problem), _kv_heads(problem, heads)
    group_tokens = tokens.sum(axis=1, keepdims=True)
    peaks = [
        fixed
        + tokens * token
        + group_tokens * (heads * q_head + kv_heads * kv_head)
        + exchanges * buffered * kv_heads * memory.buffer_per_kv_head
        for fixed, token, q_head, kv_head, buffered in memory.moments
    ]
    lent = group_tokens * kv_heads * memory.block_per_kv_head + 2 * memory.peer_fixed
    result: Floats = np.max(peaks, axis=0) + exchanges * (memory.communicator + lent)
    return result + (tokens.shape[1] > 1) * memory.communicator


def _kv_heads(problem: Problem, heads: Ints) -> Floats:
    result: Floats = np.ceil(heads / (problem.model.heads // problem.model.kv_heads))
    return result


def _fetch(problem: Problem, rank: list[int], heads: Ints, others: Floats) -> Floats:
    """Return [choices, ranks]: keys and values of one layer, `others` tokens of them."""
    rates = problem.rates
    num_bytes = 2 * 2 * problem.model.head_dim * _kv_heads(problem, heads) * others[:, None]
    result: Floats = num_bytes / (rates.in_node[rank] + rates.across[rank])
    return result


def _groups_with_others(problem: Problem, batch: Choices) -> Iterator[tuple[Ranks, Floats]]:
    """Yield each group with the fewest tokens of other groups, by choice, that it can fetch."""
    of_earlier, of_later = 0.5, 1.0  # in nesting order
    if batch.structure.arrangement == "contiguous":
        of_earlier, of_later = 1.0, 0.0  # in the order of the stream
    if not problem.workload.causal:
        of_earlier = of_later = 1.0
    start = 0
    for groups in batch.structure.replicas:
        sizes = [len(group) for group in groups]
        stops = start + np.cumsum(sizes)
        own = [
            batch.tokens[:, stop - size : stop].sum(axis=1)
            for stop, size in zip(stops, sizes, strict=True)
        ]
        stream, before = np.sum(own, axis=0), np.zeros(len(batch.tokens))
        for group, tokens in zip(groups, own, strict=True):
            yield group, of_earlier * before + of_later * (stream - before - tokens)
            before = before + tokens
        start = stops[-1]


def _pairs(problem: Problem, batch: Choices) -> list[Floats]:
    """Return for each group the pairs of its tokens, by choice."""
    workload, pairs = problem.workload, []
    start = 0
    for groups in batch.structure.replicas:
        before = np.zeros(len(batch.tokens))
        for group in groups:
            own = batch.tokens[:, start : start + len(group)].sum(axis=1)
            if batch.structure.arrangement == "balanced":
                pairs.append(own * workload.pairs_per_token)
            else:
                pairs.append(_pairs_before(problem, before + own) - _pairs_before(problem, before))
            before = before + own
            start += len(group)
    return pairs


def _pairs_before(problem: Problem, position: Floats) -> Floats:
    """Return the pairs of all tokens of a stream of undivided sequences before a position."""
    assert problem.workload.documents is None, "tiny sequences are one document"
    length = problem.workload.seq_len
    whole, rest = np.divmod(position, length)
    if not problem.workload.causal:
        result: Floats = position * length
        return result
    result = whole * length * (length + 1) / 2 + rest * (rest + 1) / 2
    return result
