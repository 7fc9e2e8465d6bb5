"""Messages that move as keys do between groups: fetched from memory that ranks share, or sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hexiseq_triton.channel import Channel, Mark, Message, Pending, wait_for
from hexiseq_triton.context import ParallelContext
from hexiseq_triton.peer_routes import PeerRoutes
from hexiseq_triton.signals import Count


def keys_channel(context: ParallelContext, most_bytes: int) -> Channel:
    """Return a channel on which messages take the way of keys; a call of all ranks.

    Args:
        context: whose keys.
        most_bytes: of a message.
    """
    if context.peer_routes is None:
        return context.routes
    return FetchChannel(context.routes, context.peer_routes, most_bytes)


class FetchChannel(Channel):
    """Each end fetches as many bytes from the other's memory, once the other has started too.

    They are whatever stands there: this is for measuring.

    Args:
        channel: the ranks.
        routes: their memory.
        most_bytes: of a message.
    """

    def __init__(self, channel: Channel, routes: PeerRoutes, most_bytes: int) -> None:
        self.__dict__.update(vars(channel))
        self._routes = routes
        self._sent: Counter[int] = Counter()
        self._awaited: Counter[int] = Counter()
        routes.memory.reserve(most_bytes, 0)

    def start(self, sends: Sequence[Message], receives: Sequence[Message], what: str) -> Pending:
        """See `Channel.start`."""
        lane = self._routes.keys_lane
        with lane.issuing(lane.mark()):
            for peer, _ in sends:
                self._sent[peer] += 1
                self._routes.send(peer, Count.MEASURED, self._sent[peer])
            for peer, into in receives:
                self._awaited[peer] += 1
                self._routes.wait(peer, Count.MEASURED, self._awaited[peer])
                number = self._routes.number[peer]
                into.copy_(self._routes.memory.remote(number, 0, into.shape, into.dtype))
            return _Fetched(lane.mark())


class _Fetched(Pending):
    """Messages that are there once the lane has passed a mark."""

    def __init__(self, mark: Mark) -> None:
        super().__init__((), (), "a fetch")
        self._mark = mark

    def wait(self) -> None:
        """See `Pending.wait`."""
        wait_for(self._mark)
