"""The event engine: transfers under way at one time share their ports max-min fairly.

Rates of all transfers rise together, in bytes/s, until a port is full; those that pass it stop
there, the others go on (progressive filling). A collective counts as one transfer with ports on
many ranks, of as many bytes as its fullest port carries. When a transfer begins or ends, the rates
of those that share ports with it, directly or through others, are found again.

Everything that happens at one time is handled together, in the order of operations: the result
never depends on anything but the graph.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from hexiseq_triton.planner.rates import Floats, Ints
from hexiseq_triton.planner.simulator.graph import Graph
from hexiseq_triton.planner.simulator.links import Narrow

_SAME = 1e-12
"""How far apart, of their size, two times or rates are taken to be the same."""
_AGAIN = 1e-3
"""When a collective's rate is found again, as a share of its length alone."""
_DUE = -2
"""Marks the event that it is time for that."""


class _Uses(NamedTuple):
    """Who uses which ports: arrays over uses, those of operation i from starts[i] on.

    `user` is the operation, `seconds` how long the port would take for it alone; `weight` is over
    operations, 1 / bytes.
    """

    starts: Narrow
    port: Narrow
    seconds: Floats
    user: Ints
    weight: Floats


class _Lists(NamedTuple):
    """The uses under way, as a linked list for each port; -1 ends it."""

    head: Ints
    following: Ints
    preceding: Ints


class _Search(NamedTuple):
    """Ports and flows that share with those that changed, and what is found for them.

    `port_seen` and `flow_seen` hold the number of the last search that came by. `room` is what is
    left of a port, 1 at first; `claimed` what its flows take of it for each unit of level. `fresh`
    is the new rate of a flow, negative until it is found.
    """

    port_seen: Ints
    flow_seen: Ints
    ports: Ints
    flows: Ints
    room: Floats
    claimed: Floats
    fresh: Floats


class _Flows(NamedTuple):
    """Transfers: the fraction left at a time, fractions a second since then, and what comes next.

    `version` counts the rates a flow had: events of earlier ones don't count. `asked` says whether
    a collective's next search is among the events, which is due at `due`.
    """

    under_way: NDArray[np.bool_]
    left: Floats
    rate: Floats
    since: Floats
    version: Ints
    due: Floats
    asked: NDArray[np.bool_]


def fair_sharing(graph: Graph) -> tuple[Floats, Floats]:
    """Return when each operation starts and stops, in seconds from the section's start."""
    count, num_uses, num_ports = len(graph), len(graph.use_port), graph.num_ports
    user = np.repeat(np.arange(count), np.diff(graph.use_starts))
    weight = _weights(graph.use_starts, graph.use_bytes)
    uses = _Uses(graph.use_starts, graph.use_port, graph.use_seconds, user, weight)
    lists = _Lists(*(np.full(size, -1) for size in (num_ports, num_uses, num_uses)))
    search = _Search(
        port_seen=np.zeros(num_ports, dtype=np.int64),
        flow_seen=np.zeros(count, dtype=np.int64),
        ports=np.zeros(num_ports, dtype=np.int64),
        flows=np.zeros(count, dtype=np.int64),
        room=np.zeros(num_ports),
        claimed=np.zeros(num_ports),
        fresh=np.zeros(count),
    )
    flows = _Flows(
        under_way=np.zeros(count, dtype=np.bool_),
        left=np.ones(count),
        rate=np.zeros(count),
        since=np.zeros(count),
        version=np.zeros(count, dtype=np.int64),
        due=np.zeros(count),
        asked=np.zeros(count, dtype=np.bool_),
    )
    collective = graph.peer < 0
    start, stop = _run(
        graph.seconds, graph.dep_starts, graph.deps, collective, uses, lists, search, flows
    )
    return start, stop


@numba.njit(cache=True)
def _run(
    seconds: Floats,
    dep_starts: Narrow,
    deps: Narrow,
    collective: NDArray[np.bool_],
    uses: _Uses,
    lists: _Lists,
    search: _Search,
    flows: _Flows,
) -> tuple[Floats, Floats]:
    count = len(seconds)
    start, stop = np.zeros(count), np.zeros(count)
    dependent_starts, dependents = _reversed(dep_starts, deps)
    waiting = np.diff(dep_starts)
    events = [(0.0, 0, 0) for _ in range(0)]  # when, which, and its version at that time
    for op in range(count):
        if waiting[op] == 0:
            heappush(events, (seconds[op], op, 0))
    turn = 0
    while events:
        now, turn = events[0][0], turn + 1
        changed, again = 0, False
        while events and events[0][0] <= now * (1 + _SAME):
            _, op, version = heappop(events)
            moves = uses.starts[op] < uses.starts[op + 1]
            if version == _DUE:
                flows.asked[op] = False
                if flows.under_way[op]:
                    changed, again = _marked(op, uses, search, turn, changed), True
                continue
            if version != flows.version[op]:
                continue
            if moves:
                again = again or collective[op]
                changed = _marked(op, uses, search, turn, changed)
                if not flows.under_way[op]:
                    flows.under_way[op], flows.since[op] = True, now
                    _enter(op, uses, lists)
                    continue
                flows.under_way[op] = False
                _leave(op, uses, lists)
            stop[op] = now
            flows.version[op] = -1
            for d in range(dependent_starts[op], dependent_starts[op + 1]):
                ready = dependents[d]
                waiting[ready] -= 1
                if waiting[ready] == 0:
                    start[ready] = now
                    heappush(events, (now + seconds[ready], ready, 0))
        if changed:
            reached, ports = _reach(
                changed, again, now, collective, uses, lists, search, flows, turn, events
            )
            _fill(search.ports[:ports], uses, lists, search)
            _hasten(search.flows[:reached], now, flows, search.fresh, events)
    return start, stop


@numba.njit(cache=True)
def _marked(op: int, uses: _Uses, search: _Search, turn: int, changed: int) -> int:
    """Note an operation's ports as changed; return how many have."""
    for u in range(uses.starts[op], uses.starts[op + 1]):
        port = uses.port[u]
        if search.port_seen[port] != turn:
            search.port_seen[port] = turn
            search.ports[changed] = port
            changed += 1
    return changed


@numba.njit(cache=True)
def _enter(op: int, uses: _Uses, lists: _Lists) -> None:
    for u in range(uses.starts[op], uses.starts[op + 1]):
        first = lists.head[uses.port[u]]
        lists.following[u], lists.preceding[u] = first, -1
        if first >= 0:
            lists.preceding[first] = u
        lists.head[uses.port[u]] = u


@numba.njit(cache=True)
def _leave(op: int, uses: _Uses, lists: _Lists) -> None:
    for u in range(uses.starts[op], uses.starts[op + 1]):
        before, after = lists.preceding[u], lists.following[u]
        if before >= 0:
            lists.following[before] = after
        else:
            lists.head[uses.port[u]] = after
        if after >= 0:
            lists.preceding[after] = before


@numba.njit(cache=True)
def _reach(
    num_ports: int,
    again: bool,
    now: float,
    collective: NDArray[np.bool_],
    uses: _Uses,
    lists: _Lists,
    search: _Search,
    flows: _Flows,
    turn: int,
    events: list[tuple[float, int, int]],
) -> tuple[int, int]:
    """Find all flows and ports that changed ones lead to; return how many of each.

    Collectives keep their rates unless they are looked at `again`, which is asked for when due.
    """
    found, at = 0, 0
    while at < num_ports:
        port = search.ports[at]
        at += 1
        search.room[port], search.claimed[port] = 1.0, 0.0
        u = lists.head[port]
        while u >= 0:
            op = uses.user[u]
            if collective[op] and not again:
                search.room[port] -= uses.seconds[u] * flows.rate[op]
                if not flows.asked[op]:
                    flows.asked[op] = True
                    heappush(events, (max(now, flows.due[op]), op, _DUE))
            else:
                search.claimed[port] += uses.seconds[u] * uses.weight[op]
                if search.flow_seen[op] != turn:
                    search.flow_seen[op] = turn
                    search.flows[found] = op
                    found += 1
                    search.fresh[op] = -1.0
                    alone = uses.seconds[uses.starts[op] : uses.starts[op + 1]].max()
                    flows.due[op] = now + _AGAIN * alone
                    num_ports = _marked(op, uses, search, turn, num_ports)
            u = lists.following[u]
    return found, num_ports


@numba.njit(cache=True)
def _fill(ports: Ints, uses: _Uses, lists: _Lists, search: _Search) -> None:
    """Find the fair rate of every flow through `ports`.

    A flow of weight w has the rate w times a level that rises until one of its ports is full. A
    port's own level only rises as flows stop elsewhere, so the lowest one found is looked at again.
    """
    room, claimed, fresh = search.room, search.claimed, search.fresh
    lowest = [(0.0, 0) for _ in range(0)]
    for port in ports:
        if claimed[port] > 0:
            heappush(lowest, (room[port] / claimed[port], port))
    while lowest:
        level, port = heappop(lowest)
        if claimed[port] <= 0:
            continue
        current = max(room[port], 0.0) / claimed[port]
        if current > level * (1 + _SAME):
            heappush(lowest, (current, port))
            continue
        u = lists.head[port]
        while u >= 0:
            op = uses.user[u]
            if fresh[op] < 0:
                fresh[op] = uses.weight[op] * max(level, 0.0)
                for v in range(uses.starts[op], uses.starts[op + 1]):
                    room[uses.port[v]] -= uses.seconds[v] * fresh[op]
                    claimed[uses.port[v]] -= uses.seconds[v] * uses.weight[op]
            u = lists.following[u]
        claimed[port] = 0.0  # what rounding may have left


@numba.njit(cache=True)
def _hasten(
    ops: Ints, now: float, flows: _Flows, fresh: Floats, events: list[tuple[float, int, int]]
) -> None:
    """Give flows their new rates, and say when each will end."""
    for op in ops:
        if abs(fresh[op] - flows.rate[op]) <= _SAME * flows.rate[op]:
            continue
        moved = flows.rate[op] * (now - flows.since[op])
        flows.left[op] = max(0.0, flows.left[op] - moved)
        flows.since[op], flows.rate[op] = now, fresh[op]
        flows.version[op] += 1
        if fresh[op] > 0:
            heappush(events, (now + flows.left[op] / fresh[op], op, flows.version[op]))


@numba.njit(cache=True)
def _weights(use_starts: Narrow, use_bytes: Floats) -> Floats:
    """Return 1 / bytes of each operation's fullest port: equal weights are equal bytes/s."""
    weights = np.ones(len(use_starts) - 1)
    for i in range(len(weights)):
        most = 0.0
        for u in range(use_starts[i], use_starts[i + 1]):
            most = max(most, use_bytes[u])
        if most > 0:
            weights[i] = 1 / most
    return weights


@numba.njit(cache=True)
def _reversed(dep_starts: Narrow, deps: Narrow) -> tuple[Ints, Ints]:
    """Return, for each operation, which ones wait for it, in the same form."""
    count = len(dep_starts) - 1
    starts = np.zeros(count + 1, dtype=np.int64)
    for dep in deps:
        starts[dep + 1] += 1
    for i in range(count):
        starts[i + 1] += starts[i]
    free = starts.copy()
    dependents = np.empty(len(deps), dtype=np.int64)
    for op in range(count):
        for d in range(dep_starts[op], dep_starts[op + 1]):
            dependents[free[deps[d]]] = op
            free[deps[d]] += 1
    return starts, dependents
