"""One section of a step as arrays of operations, each after all that it waits for.

An operation computes on its rank, or moves bytes through ports, or does neither and is a gate:
something that several others wait for. A transfer that has two ends is queued at its ports; a
collective has ports on many ranks. `seconds` is how long computing takes, and for a transfer the
latency before its bytes flow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numba
import numpy as np
from numpy.typing import ArrayLike, NDArray

from hexiseq_triton.planner.rates import Floats, Ints
from hexiseq_triton.planner.simulator.links import Uses

KINDS = (
    "gate",
    "token-wise",
    "attention",
    "logits",
    "embedding",
    "optimizer",
    "all-to-all",
    "keys and values",
    "their gradients",
    "FSDP",
)
(
    GATE,
    TOKEN_WISE,
    ATTENTION,
    LOGITS,
    EMBEDDING,
    OPTIMIZER,
    ALL_TO_ALL,
    KEYS,
    GRADIENTS,
    FSDP,
) = range(len(KINDS))
COMPUTING = (TOKEN_WISE, ATTENTION, LOGITS, EMBEDDING, OPTIMIZER)


Number = TypeVar("Number", np.int64, np.float64)


@dataclass(frozen=True)
class Graph:
    """Arrays over operations; operation i waits for `deps[dep_starts[i] : dep_starts[i + 1]]`.

    It uses ports likewise: `use_seconds` is how long each would take it alone. `rank` is who
    computes or sends, `peer` who receives; -1 where there is none.
    """

    kind: Ints
    rank: Ints
    peer: Ints
    seconds: Floats
    flops: Floats
    dep_starts: Ints
    deps: Ints
    use_starts: Ints
    use_port: Ints
    use_seconds: Floats
    use_bytes: Floats
    num_ports: int

    def __len__(self) -> int:
        return len(self.kind)


@dataclass
class Builder:
    """Collects operations: many at a time, in any order, each with a number above those before."""

    num_ports: int
    _count: int = 0
    _blocks: list[tuple[Ints, int, ArrayLike, ArrayLike, ArrayLike, ArrayLike]] = field(
        default_factory=list
    )
    _after: list[tuple[Ints, Ints]] = field(default_factory=list)
    _uses: list[tuple[Ints, Uses]] = field(default_factory=list)

    def take(self, count: int) -> Ints:
        """Return the numbers of `count` new operations; they are gates until something is added."""
        self._count += count
        return np.arange(self._count - count, self._count)

    def compute(
        self, ops: Ints, kind: int, rank: Ints, seconds: ArrayLike, flops: ArrayLike
    ) -> None:
        """Let operations compute."""
        self._blocks.append((ops, kind, rank, -1, seconds, flops))

    def transfer(
        self, ops: Ints, kind: int, ends: tuple[Ints, Ints], latency: Floats, uses: Uses
    ) -> None:
        """Let operations move bytes from one rank to another; `uses` are of positions in `ops`."""
        self._blocks.append((ops, kind, *ends, latency, 0.0))
        self._uses.append((ops, uses))

    def collective(self, ops: Ints, kind: int, latency: ArrayLike, uses: Uses) -> None:
        """Let operations move bytes among many ranks."""
        self._blocks.append((ops, kind, -1, -1, latency, 0.0))
        self._uses.append((ops, uses))

    def after(self, ops: Ints, deps: Ints) -> None:
        """Let operations wait for others, one for one; broadcasting as numpy does."""
        first, second = np.broadcast_arrays(ops, deps)
        self._after.append((first.ravel(), second.ravel()))

    def build(self) -> Graph:
        """Return the graph."""
        count = self._count
        kind, rank, peer = (np.full(count, value, dtype=np.int64) for value in (GATE, -1, -1))
        seconds, flops = np.zeros(count), np.zeros(count)
        columns = (rank, peer, seconds, flops)
        for ops, what, *values in self._blocks:
            kind[ops] = what
            for column, value in zip(columns, values, strict=True):
                column[ops] = value
        ops, deps = (_joined(parts, np.int64) for parts in _columns(self._after))
        assert (deps < ops).all(), "an operation waits for a later one"
        uses = [found for _, found in self._uses]
        use_starts, port, use_seconds, num_bytes = _uses_by_operation(
            _joined([ops[uses.at] for ops, uses in self._uses], np.int64),
            _joined([each.port for each in uses], np.int64),
            _joined([each.seconds for each in uses], np.float64),
            _joined([each.num_bytes for each in uses], np.float64),
            count,
        )
        dep_starts, deps = _deps_by_operation(ops, deps, count)
        return Graph(
            kind,
            rank,
            peer,
            seconds,
            flops,
            dep_starts,
            deps,
            use_starts,
            port,
            use_seconds,
            num_bytes,
            self.num_ports,
        )


def _columns(pairs: list[tuple[Ints, Ints]]) -> tuple[list[Ints], list[Ints]]:
    return [first for first, _ in pairs], [second for _, second in pairs]


def _joined(parts: Sequence[NDArray[Number]], kind: type[Number]) -> NDArray[Number]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=kind)


@numba.njit(cache=True)
def _starts(ops: Ints, count: int) -> Ints:
    """Return where each operation's entries start once they are sorted by it, and the end."""
    starts = np.zeros(count + 1, dtype=np.int64)
    for op in ops:
        starts[op + 1] += 1
    for i in range(count):
        starts[i + 1] += starts[i]
    return starts


@numba.njit(cache=True)
def _deps_by_operation(ops: Ints, deps: Ints, count: int) -> tuple[Ints, Ints]:
    """Return where each operation's entries start, and what it waits for."""
    starts = _starts(ops, count)
    free, sorted_deps = starts.copy(), np.empty_like(deps)
    for i in range(len(ops)):
        sorted_deps[free[ops[i]]] = deps[i]
        free[ops[i]] += 1
    return starts, sorted_deps


@numba.njit(cache=True)
def _uses_by_operation(
    ops: Ints, port: Ints, seconds: Floats, num_bytes: Floats, count: int
) -> tuple[Ints, Ints, Floats, Floats]:
    """Return where each operation's entries start, and ports, seconds and bytes of its uses."""
    starts = _starts(ops, count)
    free = starts.copy()
    ports, times, sizes = np.empty_like(port), np.empty_like(seconds), np.empty_like(num_bytes)
    for i in range(len(ops)):
        at = free[ops[i]]
        ports[at], times[at], sizes[at] = port[i], seconds[i], num_bytes[i]
        free[ops[i]] = at + 1
    return starts, ports, times, sizes
