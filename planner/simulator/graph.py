"""One section of a step as arrays of operations, each after all that it waits for.

An operation computes on its rank, or moves bytes through ports, or does neither and is a gate:
something that several others wait for. A transfer that has two ends is queued at its ports; a
collective has ports on many ranks. `seconds` is how long computing takes, and for a transfer the
latency before its bytes flow.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numba
import numpy as np
from numpy.typing import ArrayLike

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
        columns = ((rank, -1), (peer, -1), (seconds, 0), (flops, 0))
        for ops, what, *values in self._blocks:
            kind[ops] = what
            for (column, filled_with), value in zip(columns, values, strict=True):
                if not np.isscalar(value) or value != filled_with:
                    column[ops] = value
        dep_starts, deps = self._deps()
        use_starts, port, use_seconds, num_bytes = self._ports()
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

    def _deps(self) -> tuple[Ints, Ints]:
        """Return where each operation's entries start, and what it waits for."""
        counts = np.zeros(self._count + 1, dtype=np.int64)
        for ops, _ in self._after:
            _count(counts, ops)
        starts = np.cumsum(counts)
        free, sorted_deps = starts.copy(), np.empty(starts[-1], dtype=np.int64)
        for ops, deps in self._after:
            assert _place_deps(free, ops, deps, sorted_deps), "an operation waits for a later one"
        return starts, sorted_deps

    def _ports(self) -> tuple[Ints, Ints, Floats, Floats]:
        """Return where each operation's entries start, and ports, seconds and bytes of its uses."""
        counts = np.zeros(self._count + 1, dtype=np.int64)
        for ops, uses in self._uses:
            _count(counts, ops[uses.at])
        starts = np.cumsum(counts)
        free, ports = starts.copy(), np.empty(starts[-1], dtype=np.int64)
        seconds, num_bytes = np.empty(len(ports)), np.empty(len(ports))
        for ops, uses in self._uses:
            _place_uses(free, ops, *uses, ports, seconds, num_bytes)
        return starts, ports, seconds, num_bytes


@numba.njit(cache=True)
def _count(counts: Ints, ops: Ints) -> None:
    """Count an entry more for each of some operations; the first count is of none."""
    for op in ops:
        counts[op + 1] += 1


@numba.njit(cache=True)
def _place_deps(free: Ints, ops: Ints, deps: Ints, out: Ints) -> bool:
    """Place what operations wait for; return whether all of it comes before them."""
    fine = True
    for i in range(len(ops)):
        op = ops[i]
        fine &= deps[i] < op
        out[free[op]] = deps[i]
        free[op] += 1
    return fine


@numba.njit(cache=True)
def _place_uses(
    free: Ints,
    ops: Ints,
    at: Ints,
    port: Ints,
    num_bytes: Floats,
    seconds: Floats,
    ports: Ints,
    all_seconds: Floats,
    all_bytes: Floats,
) -> None:
    """Place the ports that operations use."""
    for i in range(len(at)):
        op = ops[at[i]]
        to = free[op]
        ports[to], all_seconds[to], all_bytes[to] = port[i], seconds[i], num_bytes[i]
        free[op] = to + 1
