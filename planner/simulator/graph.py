"""One section of a step as arrays of operations, each after all that it waits for.

An operation computes on its rank, or moves bytes through ports, or does neither and is a gate:
something that several others wait for. A transfer that has two ends is queued at its ports; a
collective has ports on many ranks. `seconds` is how long computing takes, and for a transfer the
latency before its bytes flow.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numba
import numpy as np
from numpy.typing import ArrayLike, NDArray

from hexiseq_triton.planner.rates import Floats, Ints
from hexiseq_triton.planner.simulator.links import Narrow, Uses

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

    kind: NDArray[np.int8]
    rank: Narrow
    peer: Narrow
    seconds: Floats
    flops: Floats
    dep_starts: Narrow
    deps: Narrow
    use_starts: Narrow
    use_port: Narrow
    use_seconds: Floats
    use_bytes: Floats
    num_ports: int

    def __len__(self) -> int:
        return len(self.kind)


@dataclass
class Builder:
    """Collects operations: many at a time, in any order, each with a number above those before."""

    num_ports: int
    count: int = 0
    _blocks: list[tuple[Ints, int, ArrayLike, ArrayLike, ArrayLike, ArrayLike]] = field(
        default_factory=list
    )
    _after: list[tuple[Narrow, Narrow]] = field(default_factory=list)
    _in_order: list[tuple[int, Narrow, Narrow]] = field(default_factory=list)
    _uses: list[tuple[Ints, Uses]] = field(default_factory=list)

    def take(self, count: int) -> Ints:
        """Return the numbers of `count` new operations; they are gates until something is added."""
        self.count += count
        return np.arange(self.count - count, self.count)

    def take_in_order(self, counts: Narrow, deps: Narrow) -> None:
        """Take new operations that wait for so many of `deps` each, and for nothing else."""
        self._in_order.append((self.count, counts, deps))
        self.count += len(counts)

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
        if ops.shape != deps.shape:
            ops, deps = np.broadcast_arrays(ops, deps)
        self._after.append((ops.astype(np.int32).ravel(), deps.astype(np.int32).ravel()))

    def build(self) -> Graph:
        """Return the graph."""
        count = self.count
        kind = np.full(count, GATE, dtype=np.int8)
        rank, peer = (np.full(count, -1, dtype=np.int32) for _ in range(2))
        seconds, flops = np.zeros(count), np.zeros(count)
        columns: list[tuple[NDArray[Any], int]]
        columns = [(rank, -1), (peer, -1), (seconds, 0), (flops, 0)]
        for ops, what, *values in self._blocks:
            kind[ops] = what
            for (column, filled_with), value in zip(columns, values, strict=True):
                if isinstance(value, np.ndarray) and value.shape == ops.shape:
                    _place(column, ops, value)
                elif not np.isscalar(value) or value != filled_with:
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

    def _deps(self) -> tuple[Narrow, Narrow]:
        """Return where each operation's entries start, and what it waits for."""
        starts = np.zeros(self.count + 2, dtype=np.int32)
        for ops, _ in self._after:
            _count(starts, ops)
        for first, counts, _ in self._in_order:
            starts[first + 2 : first + 2 + len(counts)] = counts
        np.cumsum(starts, out=starts)
        sorted_deps = np.empty(starts[-1], dtype=np.int32)
        for first, counts, deps in self._in_order:
            sorted_deps[starts[first + 1] : starts[first + 1] + len(deps)] = deps
            starts[first + 1 : first + 1 + len(counts)] += counts
        for ops, deps in self._after:
            assert _place_deps(starts, ops, deps, sorted_deps), "an operation waits for a later one"
        return starts[:-1], sorted_deps

    def _ports(self) -> tuple[Narrow, Narrow, Floats, Floats]:
        """Return where each operation's entries start, and ports, seconds and bytes of its uses."""
        starts = np.zeros(self.count + 2, dtype=np.int32)
        for ops, uses in self._uses:
            _count(starts, ops[uses.at])
        np.cumsum(starts, out=starts)
        ports = np.empty(starts[-1], dtype=np.int32)
        seconds, num_bytes = np.empty(len(ports)), np.empty(len(ports))
        for ops, uses in self._uses:
            _place_uses(starts, ops, *uses, ports, seconds, num_bytes)
        return starts[:-1], ports, seconds, num_bytes


@numba.njit(cache=True)
def _place(column: NDArray[Any], ops: Ints, values: NDArray[Any]) -> None:
    for i in range(len(ops)):
        column[ops[i]] = values[i]


@numba.njit(cache=True)
def _count(counts: Narrow, ops: Ints | Narrow) -> None:
    """Count an entry more for each of some operations, two places after its own.

    Summed up, there the next one's entries start. Placing entries then moves what stands one place
    after an operation from its own start to that.
    """
    for op in ops:
        counts[op + 2] += 1


@numba.njit(cache=True)
def _place_deps(starts: Narrow, ops: Narrow, deps: Narrow, out: Narrow) -> bool:
    """Place what operations wait for; return whether all of it comes before them."""
    fine = True
    for i in range(len(ops)):
        op = ops[i]
        fine &= deps[i] < op
        out[starts[op + 1]] = deps[i]
        starts[op + 1] += 1
    return fine


@numba.njit(cache=True)
def _place_uses(
    starts: Narrow,
    ops: Ints,
    at: Narrow,
    port: Narrow,
    num_bytes: Floats,
    seconds: Floats,
    ports: Narrow,
    all_seconds: Floats,
    all_bytes: Floats,
) -> None:
    """Place the ports that operations use."""
    for i in range(len(at)):
        op = ops[at[i]]
        to = starts[op + 1]
        ports[to], all_seconds[to], all_bytes[to] = port[i], seconds[i], num_bytes[i]
        starts[op + 1] = to + 1
