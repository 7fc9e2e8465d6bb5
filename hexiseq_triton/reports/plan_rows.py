"""The rows in which a plan is shown: one a rank, or on large clusters one for ranks that are alike.

Groups with the same GPU models in the same order share a section; in it, neighbouring ranks of one
model share a row. What differs between them is shown from least to most.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from hexiseq_triton.planner.plans import Plan, RankShare

RANKS_SHOWN = 32
"""Plans with more working ranks are shown by rows of alike ranks."""


@dataclass(frozen=True)
class Row:
    """Ranks of one GPU model that are shown together; `node` is the first one's."""

    shares: tuple[RankShare, ...]

    @property
    def gpu(self) -> str | None:
        return self.shares[0].gpu

    @property
    def ranks(self) -> str:
        return spans(share.rank for share in self.shares)

    @property
    def node(self) -> str | None:
        return self.shares[0].node

    @property
    def tokens(self) -> str:
        return _from_to([share.tokens for share in self.shares])

    @property
    def q_heads(self) -> str:
        return _heads([share.q_heads for share in self.shares])

    @property
    def kv_heads(self) -> str:
        return _heads([share.kv_heads for share in self.shares])

    @property
    def seconds(self) -> tuple[float, float] | None:
        """The shortest and longest busy time."""
        times = [share.seconds for share in self.shares if share.seconds is not None]
        return (min(times), max(times)) if times else None

    @property
    def fullest(self) -> tuple[int, int] | None:
        """Bytes and limit of the rank that comes closest to its limit."""
        known = [
            (share.memory_bytes, share.memory_limit_bytes)
            for share in self.shares
            if share.memory_bytes is not None and share.memory_limit_bytes
        ]
        return max(known, key=lambda pair: pair[0] / pair[1]) if known else None


@dataclass(frozen=True)
class Section:
    """Groups that are shown together, and their rows."""

    groups: tuple[int, ...]
    replicas: tuple[int, ...]
    rows: tuple[Row, ...]


def plan_sections(plan: Plan, *, merged: bool | None = None) -> list[Section]:
    """Return the sections of a plan's table.

    Args:
        plan: the plan.
        merged: whether alike ranks share rows; left out, if there are more than `RANKS_SHOWN`.
    """
    groups = [(r, group) for r, replica in enumerate(plan.replicas) for group in replica.groups]
    if merged is None:
        merged = len(plan.shares) > RANKS_SHOWN
    if not merged:
        return [
            Section((g,), (replica,), tuple(Row((share,)) for share in group.ranks))
            for g, (replica, group) in enumerate(groups)
        ]
    alike: dict[tuple[tuple[str | None, int], ...], list[int]] = {}
    runs = [_runs(group.ranks) for _, group in groups]
    for g, group_runs in enumerate(runs):
        makeup = tuple((run[0].gpu, len(run)) for run in group_runs)
        alike.setdefault(makeup, []).append(g)
    return [
        Section(
            tuple(members),
            tuple(dict.fromkeys(groups[g][0] for g in members)),
            tuple(
                Row(tuple(share for g in members for share in runs[g][row]))
                for row in range(len(makeup))
            ),
        )
        for makeup, members in alike.items()
    ]


def _runs(shares: Iterable[RankShare]) -> list[tuple[RankShare, ...]]:
    """Return the neighbouring ranks of one GPU model, run by run."""
    return [tuple(run) for _, run in groupby(shares, key=lambda share: share.gpu)]


def spans(numbers: Iterable[int], most: int = 4) -> str:
    """Return numbers as spans, "0-7, 12"; after `most` spans only how many are left out."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:most]]
    rest = sum(b - a + 1 for a, b in runs[most:])
    return ", ".join([*shown, f"{rest} more"] if rest else shown)


def _from_to(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return f"{low:,}" if low == high else f"{low:,}-{high:,}"


def _heads(ranges: Sequence[tuple[int, int]]) -> str:
    """Return one rank's interval, or how many heads each of several ranks has."""
    if len(ranges) == 1:
        return f"[{ranges[0][0]}, {ranges[0][1]})"
    return _from_to([stop - start for start, stop in ranges])
