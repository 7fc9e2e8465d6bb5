"""What every exchange needs to know of one direction of a replica's attention, and what slows it.

Computing and transfers that go on at once slow each other (`rates.together`). Both engines run on
lengths that have this in them: it is taken once for each rank, from all it computes and all that
passes its ports.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hexiseq_triton.planner.exchange import ANSWER
from hexiseq_triton.planner.rates import Floats, Ints, together
from hexiseq_triton.planner.simulator.graph import ATTENTION, GRADIENTS, KEYS, Builder
from hexiseq_triton.planner.simulator.links import COPY_ENGINE, NIC_OUT, Links, port_seconds
from hexiseq_triton.planner.simulator.replicas import ReplicaView


@dataclass
class Attention:
    """One direction of one replica's attention, on its way into a graph.

    Attributes:
        builder: where operations go.
        links: the ports.
        view: the replica.
        seconds: of computing alone, for each row.
        flops: for each row.
        begin: what each row waits for.
        backward: whether gradients of keys and values travel too.
    """

    builder: Builder
    links: Links
    view: ReplicaView
    seconds: Floats
    flops: Floats
    begin: Ints
    backward: bool

    def slowed(self, *moving: Hops) -> Slowed:
        """Return how much longer computing and transfers take beside each other."""
        links, rank = self.links, self.view.rank
        by_port = np.zeros(links.num_ports)
        for hops in moving:
            by_port += hops.by_port
        by_class = by_port.reshape(-1, links.world_size)[:COPY_ENGINE]
        if links.conditions.copy_engine:
            by_class = by_class[NIC_OUT:]  # only transfers to other nodes are kernels
        moved = by_class.max(axis=0)
        overlap = links.rates.overlap
        aside = 1 + overlap.attention_slowdown * (len(moving) > 0)
        computing, transfer = together(aside * self.seconds, moved[rank], overlap)
        of_port = np.ones(links.num_ports)
        slower = np.ones(links.world_size)
        slower[rank] = _ratio(transfer, moved[rank])
        of_port[: COPY_ENGINE * links.world_size] = np.tile(slower, COPY_ENGINE)
        return Slowed(self.seconds * _ratio(computing, self.seconds), of_port)

    def compute(self, ops: Ints, slowed: Slowed, share: Floats) -> None:
        """Let [steps, rows] operations compute their share of each row's attention."""
        rank = np.broadcast_to(self.view.rank, ops.shape).ravel()
        seconds, flops = (share * slowed.seconds).ravel(), (share * self.flops).ravel()
        self.builder.compute(ops.ravel(), ATTENTION, rank, seconds, flops)

    def move(self, ops: Ints, slowed: Slowed, hops: Hops, *, gradients: bool = False) -> None:
        """Let operations move what `hops` say."""
        uses = hops.uses._replace(seconds=hops.uses.seconds * slowed.of_port[hops.uses.port])
        kind = GRADIENTS if gradients else KEYS
        self.builder.transfer(ops.ravel(), kind, hops.ends, hops.latency, uses)


@dataclass(frozen=True)
class Slowed:
    """Seconds of attention of each row, and how many times longer each port takes."""

    seconds: Floats
    of_port: Floats


class Hops:
    """Transfers of keys and values, one after the other: ranks of the two ends, and bytes.

    Passes share them: forward's are those that backward begins with.
    """

    def __init__(self, links: Links, ends: tuple[Ints, Ints], num_bytes: Floats) -> None:
        self.ends, self.num_bytes, self._links = ends, num_bytes, links
        self.latency, self.uses = links.point_to_point(*ends, num_bytes)
        self.by_port = port_seconds(self.uses.port, self.uses.seconds, links.num_ports)

    @classmethod
    def between(
        cls, links: Links, view: ReplicaView, ends: tuple[Ints, Ints], num_bytes: Floats
    ) -> Hops:
        """Return transfers between rows of a view."""
        sender, receiver = ends
        return cls(links, (view.rank[sender], view.rank[receiver]), num_bytes.ravel())

    @cached_property
    def returned(self) -> Hops:
        """The transfers of their gradients, the other way."""
        return Hops(self._links, self.ends[::-1], ANSWER * self.num_bytes)


def _ratio(longer: Floats, seconds: Floats) -> Floats:
    result: Floats = np.where(seconds > 0, longer / np.where(seconds > 0, seconds, 1.0), 1.0)
    return result
