"""How fast ranks reach each other, measured through the runtime's own channel.

Pairs exchange in both directions at once, as the runtime's transfers do, disjoint pairs at the same
time. A link is latency and rate, fitted to the times of messages of several sizes:

    seconds = latency + bytes / rate
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

from hexiseq_triton.channel import Channel
from hexiseq_triton.profiling.clock import timed

LEAST_LATENCY = 1e-7
ROUNDS = 7
LAUNCH_CYCLES = 60_000_000
"""What the GPU waits, some 30 ms, while the host launches all that is to begin at once."""


@dataclass(frozen=True)
class Link:
    """A fitted link: seconds of latency, bytes/s in each of both directions at once."""

    latency_seconds: float
    bytes_per_s: float

    def seconds(self, num_bytes: float) -> float:
        return self.latency_seconds + num_bytes / self.bytes_per_s


def pair_rounds(world: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs in which every pair of ranks meets once."""
    even = world + world % 2
    circle = list(range(even))
    rounds = []
    for _ in range(even - 1):
        pairs = [(circle[i], circle[-1 - i]) for i in range(even // 2)]
        rounds.append([(min(p), max(p)) for p in pairs if max(p) < world])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def fitted(seconds_of_bytes: Mapping[int, float]) -> Link:
    """Return the link that fits best, errors taken relative to each time."""
    sizes = np.array(list(seconds_of_bytes), dtype=float)
    times = np.array(list(seconds_of_bytes.values()))
    rows = np.stack([1 / times, sizes / times], axis=1)
    (latency, per_byte), *_ = np.linalg.lstsq(rows, np.ones(len(times)), rcond=None)
    if latency < LEAST_LATENCY:  # nothing but bandwidth shows
        latency = LEAST_LATENCY
        per_byte = float(np.median(times / sizes))
    if per_byte <= 0:  # nothing but latency shows
        per_byte = float(times[-1] / sizes[-1])
    return Link(float(latency), 1.0 / float(per_byte))


def measured_links(
    channel: Channel, sizes: Sequence[int], device: torch.device, step: Callable[[str], None]
) -> dict[int, Link]:
    """Return this rank's link to every other rank; a collective call.

    Args:
        channel: of all ranks.
        sizes: bytes of the messages.
        device: where they lie.
        step: told what was measured, after each round.
    """
    rank = dist.get_rank()
    links = {}
    for pairs in pair_rounds(dist.get_world_size()):
        peer = next((a + b - rank for a, b in pairs if rank in (a, b)), None)
        dist.barrier()
        if peer is not None:
            links[peer] = fitted(dict(_exchanges(channel, peer, sizes, device)))
        step("links")
    return links


def _exchanges(
    channel: Channel, peer: int, sizes: Sequence[int], device: torch.device
) -> Iterator[tuple[int, float]]:
    """Yield bytes and median seconds of exchanges with one peer."""
    for num_bytes in sizes:
        out, into = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))

        def exchange(out: torch.Tensor = out, into: torch.Tensor = into) -> None:
            channel.start([(peer, out)], [(peer, into)], "a measured exchange").wait()

        exchange()
        yield num_bytes, median(timed(exchange, device) for _ in range(ROUNDS))


def ragged_all_to_all(
    channel: Channel, num_bytes: int, device: torch.device
) -> tuple[float, float]:
    """Return seconds of a ragged all-to-all, and the bytes of this rank's fuller direction.

    Rank r holds r + 1 parts of the tokens, every rank takes equal heads: what it sends to each rank
    has the size of its tokens, as in a group with uneven shares. A collective call.

    Args:
        channel: of all ranks.
        num_bytes: of all tokens and heads together.
        device: where they lie.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    part = num_bytes // (world * world * (world + 1) // 2)
    others = [each for each in range(world) if each != rank]

    def block(parts: int) -> torch.Tensor:
        return torch.zeros(part * parts, dtype=torch.uint8, device=device)

    sends = [(peer, block(rank + 1)) for peer in others]
    receives = [(peer, block(peer + 1)) for peer in others]

    def shuffle() -> None:
        channel.start(sends, receives, "a measured all-to-all").wait()

    shuffle()
    seconds = []
    for _ in range(ROUNDS):
        dist.barrier()
        seconds.append(timed(shuffle, device))
    fullest = max(sum(t.nbytes for _, t in sends), sum(t.nbytes for _, t in receives))
    return median(seconds), float(fullest)


def measured_overlap(
    channel: Channel, compute: Callable[[], object], num_bytes: int, device: torch.device
) -> tuple[float, float]:
    """Return how computing here and a shift of messages around all ranks slow each other.

    A collective call, on CUDA. The slowdowns are those of `planner.overlap`, first computing's.

    Args:
        channel: of all ranks.
        compute: launches some milliseconds of work.
        num_bytes: of a message.
        device: a CUDA device.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    out, into = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    following, before = (rank + 1) % world, (rank - 1) % world

    def shift() -> None:
        channel.start([(following, out)], [(before, into)], "a measured shift").wait()

    alone = median(timed(compute, device) for _ in range(ROUNDS))
    shift()
    moving = median(timed(shift, device) for _ in range(ROUNDS))
    longest = torch.tensor([alone / moving], device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    shifts = max(1, round(float(longest)))  # alike on all ranks, so that all can be received
    beside, moving_beside = [], []
    for _ in range(ROUNDS):
        dist.barrier()
        both = _at_once(compute, shift, shifts, device)
        beside.append(both[0])
        moving_beside.append(both[1])
    together = min(alone, shifts * moving)
    return (
        max(0.0, (median(beside) - alone) / together),
        max(0.0, (median(moving_beside) - shifts * moving) / together),
    )


def _at_once(
    compute: Callable[[], object], shift: Callable[[], None], shifts: int, device: torch.device
) -> tuple[float, float]:
    """Return the seconds of computing, and of the shifts, begun at once."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    start, computed, moved = events
    side = torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    torch.cuda._sleep(LAUNCH_CYCLES)
    start.record()
    side.wait_event(start)
    with torch.cuda.stream(side):
        for _ in range(shifts):
            shift()
        moved.record()
    compute()
    computed.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(computed) / 1e3, start.elapsed_time(moved) / 1e3
