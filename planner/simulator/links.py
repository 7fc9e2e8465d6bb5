"""The ports that bytes pass, numbered, and how long each one takes for them.

Every rank has a port into its node and a NIC to other nodes, each with two directions, and a copy
engine. Where the node has no NVLink, the port is PCIe, and what goes to the NIC passes it too. An
uplink joins a node's NICs to the others; it counts only where it is oversubscribed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from hexiseq_triton.planner.rates import Floats, Ints, Rates
from hexiseq_triton.planner.simulator.conditions import Conditions
from hexiseq_triton.planner.traffic import Ports

PORT_OUT, PORT_IN, NIC_OUT, NIC_IN, COPY_ENGINE, UPLINK_OUT, UPLINK_IN = range(7)
"""Port number = class * world size + rank, for uplinks + node."""
OUTWARDS, INWARDS = (PORT_OUT, NIC_OUT), (PORT_IN, NIC_IN)
_CLASSES = 7
_MOST_USES = 6
"""Of one transfer: port, NIC and uplink of each end."""


Narrow = NDArray[np.int32]
"""Numbers of operations, ranks and ports in graphs: so many that fresh memory costs most."""


class Uses(NamedTuple):
    """Ports that operations use: arrays over uses. `at` is the place of the operation."""

    at: Narrow
    port: Narrow
    num_bytes: Floats
    seconds: Floats


_Part = tuple[NDArray[np.bool_], int, Ints, Floats, Floats]
"""Which rows use a class of ports, whose ports, bytes, and bytes/s."""


@dataclass(frozen=True)
class Links:
    """The ports of a cluster under some conditions."""

    rates: Rates
    conditions: Conditions

    @property
    def world_size(self) -> int:
        return len(self.rates.node)

    @property
    def num_ports(self) -> int:
        return _CLASSES * self.world_size

    @cached_property
    def _uplink(self) -> Floats:
        """Bytes/s of each node's uplink."""
        nics = np.bincount(self.rates.node, self.rates.across)
        result: Floats = nics / self.conditions.oversubscription
        return result

    def point_to_point(
        self, sender: Ints, receiver: Ints, num_bytes: Floats
    ) -> tuple[Floats, Uses]:
        """Return seconds before bytes flow, and the ports of transfers; empty ones use none."""
        rates = self.rates
        uplink = self._uplink if self.conditions.oversubscription > 1 else np.zeros(0)
        latency, at, port, size, seconds = _point_to_point(
            np.ascontiguousarray(sender),
            np.ascontiguousarray(receiver),
            np.ascontiguousarray(num_bytes),
            rates.node,
            rates.shares_port,
            rates.in_node,
            rates.across,
            rates.in_node_latency,
            rates.across_latency,
            uplink,
            self.conditions.copy_engine,
        )
        return latency, Uses(at, port, size, seconds)

    def all_to_all(self, rank: Ints, traffic: Ports) -> Uses:
        """Return the ports of all-to-alls, of each row's rank; across nodes they reach less."""
        rates = self.rates
        shares, across = rates.shares_port[rank], rates.across_all_to_all[rank]
        parts: list[_Part] = []
        for port, nic, uplink, near, far in (
            (PORT_OUT, NIC_OUT, UPLINK_OUT, traffic.out_in_node, traffic.out_across),
            (PORT_IN, NIC_IN, UPLINK_IN, traffic.in_in_node, traffic.in_across),
        ):
            inside = near + np.where(shares, far, 0.0)
            parts.append((inside > 0, port, rank, inside, rates.in_node[rank]))
            parts.append((far > 0, nic, rank, far, across))
            if self.conditions.oversubscription > 1:
                node = rates.node[rank]
                rate = self._uplink[node] * across / rates.across[rank]
                parts.append((far > 0, uplink, node, far, rate))
        return self._gathered(parts)

    def in_rings(self, rank: Ints, near: Floats, far: Floats) -> Uses:
        """Return the ports of collectives in rings: each rank sends what it receives.

        Args:
            rank: of each row.
            near: bytes through each row's port; on PCIe they include those to the NIC.
            far: bytes through its NIC.
        """
        rates, node = self.rates, self.rates.node[rank]
        parts: list[_Part] = []
        for port, nic, uplink in ((PORT_OUT, NIC_OUT, UPLINK_OUT), (PORT_IN, NIC_IN, UPLINK_IN)):
            parts.append((near > 0, port, rank, near, rates.in_node[rank]))
            parts.append((far > 0, nic, rank, far, rates.across[rank]))
            if self.conditions.oversubscription > 1:
                parts.append((far > 0, uplink, node, far, self._uplink[node]))
        return self._gathered(parts)

    def _gathered(self, parts: list[_Part]) -> Uses:
        """Return the uses of parts."""
        found = []
        for used, kind, whose, num_bytes, rate in parts:
            index = np.flatnonzero(used)
            size = num_bytes[index]
            found.append((index, kind * self.world_size + whose[index], size, size / rate[index]))
        at, port, num_bytes, seconds = (np.concatenate(part) for part in zip(*found, strict=True))
        return Uses(at.astype(np.int32), port.astype(np.int32), num_bytes, seconds)


@numba.njit(cache=True)
def _point_to_point(
    sender: Ints,
    receiver: Ints,
    num_bytes: Floats,
    node: Ints,
    shares_port: NDArray[np.bool_],
    in_node: Floats,
    across: Floats,
    in_node_latency: Floats,
    across_latency: Floats,
    uplink: Floats,
    copy_engine: bool,
) -> tuple[Floats, Narrow, Narrow, Floats, Floats]:
    """Return latency and uses of transfers, one after the other; without uplinks none counts."""
    world, most = len(node), _MOST_USES * len(sender)
    at, port = np.empty(most, dtype=np.int32), np.empty(most, dtype=np.int32)
    size, seconds = np.empty(most), np.empty(most)
    latency, found = np.zeros(len(sender)), 0
    for i in range(len(sender)):
        if num_bytes[i] <= 0:
            continue
        near = node[sender[i]] == node[receiver[i]]
        latency[i] = in_node_latency[receiver[i]] if near else across_latency[receiver[i]]
        first = found
        for inwards in range(2):
            rank = receiver[i] if inwards else sender[i]
            if near or shares_port[rank]:
                port[found] = (PORT_OUT + inwards) * world + rank
                seconds[found] = num_bytes[i] / in_node[rank]
                found += 1
            if not near:
                port[found] = (NIC_OUT + inwards) * world + rank
                seconds[found] = num_bytes[i] / across[rank]
                found += 1
            if not near and len(uplink):
                port[found] = (UPLINK_OUT + inwards) * world + node[rank]
                seconds[found] = num_bytes[i] / uplink[node[rank]]
                found += 1
        if near and copy_engine:
            port[found] = COPY_ENGINE * world + sender[i]
            seconds[found] = num_bytes[i] / in_node[sender[i]]
            found += 1
        at[first:found], size[first:found] = i, num_bytes[i]
    return latency, at[:found], port[:found], size[:found], seconds[:found]


@numba.njit(cache=True)
def port_seconds(port: Narrow, seconds: Floats, num_ports: int) -> Floats:
    """Return how long each port is at work; numpy would first widen all numbers."""
    found = np.zeros(num_ports)
    for i in range(len(port)):
        found[port[i]] += seconds[i]
    return found
