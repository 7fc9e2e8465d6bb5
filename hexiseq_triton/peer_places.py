"""Where ranks that share memory find each other's keys and partial gradients; follows from plan and
batch, so nothing is said.

Places count in *lines*: the key and the value of one head of one token, or their gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hexiseq_triton.planner.heads import HeadRange
from hexiseq_triton.planner.schedule import Transfer
from hexiseq_triton.rounds import Exchange, PoolRows
from hexiseq_triton.segments import RowRange


class Region(NamedTuple):
    """Rows of one interval of heads, from line `start` on."""

    start: int
    rows: int
    heads: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.heads


Regions = dict[HeadRange, Region]
"""The regions of one rank, one for each interval, one after the other."""


@dataclass(frozen=True)
class Places:
    """What stands where at each rank of a replica.

    Attributes:
        keys: where a rank keeps the keys and values that others fetch.
        partials: where it keeps the partial gradients that others fetch: pools, as of `Exchange`.
        arrived: in which rows of its receiver's pools a transfer of a round stands.
        key_lines: lines that the keys of any rank need at most.
        partial_lines: lines that the partial gradients of any rank need at most.
    """

    keys: dict[int, Regions]
    partials: dict[int, Regions]
    arrived: dict[tuple[int, Transfer], RowRange]
    key_lines: int
    partial_lines: int


def places_of(rows: Mapping[int, int], exchanges: Mapping[int, Exchange]) -> Places:
    """Return the places of all ranks.

    Args:
        rows: of the keys that each rank holds, those of its group.
        exchanges: the rounds of each rank.
    """
    keys = {rank: _regions(_leaving(each, rows[rank])) for rank, each in exchanges.items()}
    partials = {rank: _regions(each.arrival_rows) for rank, each in exchanges.items()}
    arrived = {
        (number, item): there
        for each in exchanges.values()
        for number, round_ in enumerate(each.rounds)
        for item, there in round_.arrivals
    }
    return Places(keys, partials, arrived, _most_lines(keys), _most_lines(partials))


def _leaving(exchange: Exchange, rows: int) -> PoolRows:
    """Return the rows of each interval of which something leaves."""
    return {item.kv_heads: rows for round_ in exchange.rounds for item, _ in round_.departures}


def _regions(rows: PoolRows) -> Regions:
    found: Regions = {}
    line = 0
    for interval in sorted(rows):
        region = Region(line, rows[interval], interval[1] - interval[0])
        found[interval] = region
        line = region.stop
    return found


def _most_lines(regions: Mapping[int, Regions]) -> int:
    return max((region.stop for each in regions.values() for region in each.values()), default=0)
