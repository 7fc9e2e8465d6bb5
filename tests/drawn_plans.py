"""Hypothesis strategies: plans of every shape the partition allows, and batches for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from hexiseq_triton.planner import ExchangePlan, Plan, Split

WORLD = 5
MOST_TOKENS = 512


@dataclass(frozen=True)
class Case:
    """A plan, the document lengths of each replica's batch, and how attention is called."""

    plan: Plan
    lengths: tuple[tuple[int, ...], ...]
    head_dim: int
    options: dict[str, Any]
    seed: int

    @property
    def group_sizes(self) -> list[int]:
        return [len(group.ranks) for replica in self.plan.replicas for group in replica.groups]

    @property
    def cuts_a_kv_group(self) -> bool:
        return any(share.q_heads[0] % self.plan.q_per_kv for share in self.plan.shares)


def parts(draw: st.DrawFn, total: int, count: int) -> tuple[int, ...]:
    """Draw `count` numbers >= 0 that add up to `total`."""
    edges = sorted(draw(st.lists(st.integers(0, total), min_size=count - 1, max_size=count - 1)))
    return tuple(b - a for a, b in zip([0, *edges], [*edges, total], strict=True))


MIXED_SIZES = [(2, 1), (1, 2), (3, 1), (1, 3, 1), (2, 1, 1), (3, 1, 1), (4, 1), (2, 3), (2, 1, 2)]
HEADS = [(1, 4), (3, 2), (7, 1), (7, 2), (8, 1), (1, 7), (3, 3)]
"""Query heads for each KV head, and KV heads."""


def group_sizes(draw: st.DrawFn) -> list[int]:
    ranks = draw(st.integers(1, WORLD))
    sizes = []
    while ranks:
        sizes.append(draw(st.integers(1, ranks)))
        ranks -= sizes[-1]
    return sizes


@st.composite
def documents(draw: st.DrawFn, most: int) -> tuple[int, ...]:
    """Document lengths: one long document, or many with empty, 1-token and prime ones."""
    length = st.one_of(
        st.sampled_from([0, 1, 1, 2, 3, 5, 7, 13, 31, 61, 127, 131, 257]), st.integers(0, 200)
    )
    drawn = draw(st.one_of(st.integers(0, most).map(lambda n: [n]), st.lists(length, max_size=12)))
    kept: list[int] = []
    for number in drawn:
        kept.append(min(number, most - sum(kept)))
    return tuple(kept)


@st.composite
def attention_options(draw: st.DrawFn) -> dict[str, Any]:
    options: dict[str, Any] = {"causal": draw(st.booleans())}
    if draw(st.integers(0, 3)) == 0:
        side = st.one_of(st.just(-1), st.integers(0, 40))
        options["window_size"] = (draw(side), draw(side))
    if draw(st.integers(0, 3)) == 0:
        options["softcap"] = draw(st.sampled_from([0.5, 5.0]))
    if draw(st.integers(0, 3)) == 0:
        options["softmax_scale"] = 0.3
    if draw(st.integers(0, 3)) == 0:
        options["sink"] = True
    return options


@st.composite
def cases(draw: st.DrawFn, mixed: bool = False) -> Case:
    """One replica of 1 to 5 ranks, in groups of any sizes, with any tokens and any heads.

    Of `mixed` cases groups differ in size, and several query heads share a KV head.
    """
    per_kv, kv = draw(st.sampled_from([h for h in HEADS if h[0] > 1] if mixed else HEADS))
    sizes = list(draw(st.sampled_from(MIXED_SIZES))) if mixed else group_sizes(draw)
    numbers = draw(st.permutations(range(WORLD)))
    most = draw(st.sampled_from([16, 100, 256, MOST_TOKENS]))
    lengths = draw(documents(most))
    # either the plan is for this batch, or the batch is dealt in the plan's proportions
    total = max(1, draw(st.one_of(st.just(sum(lengths)), st.integers(1, 64))))
    splits = []
    for size, tokens in zip(sizes, parts(draw, total, len(sizes)), strict=True):
        taken, numbers = numbers[:size], numbers[size:]
        splits.append(
            Split(parts(draw, tokens, size), parts(draw, per_kv * kv, size), tuple(taken))
        )
    options = draw(attention_options())
    exchange = ExchangePlan(
        draw(st.sampled_from(["balanced", "balanced", "contiguous"])),
        draw(st.sampled_from([1000, 64, 17])),
        draw(st.integers(1, 3)),
        order=draw(st.sampled_from([None, "ring", "spread", "spread"])),
    )
    plan = Plan.from_splits(
        splits, num_kv_heads=kv, world_size=WORLD, causal=options["causal"], exchange=exchange
    )
    return Case(
        plan, (lengths,), draw(st.sampled_from([2, 4, 8])), options, draw(st.integers(0, 99))
    )
