"""Zeros in memory, in which the programs of a launch count.

Every launch needs its own, since it leaves other numbers there. Clearing memory is a launch itself,
a microsecond or two on the card and ten on the host, so it is done for many at once.
"""

from __future__ import annotations

import torch
import triton

_COUNTERS = 256
"""Of a launch: more than a card of compute capability 9.0 has multiprocessors."""
_AT_ONCE = 64

_cleared: dict[tuple[int, int], list[torch.Tensor]] = {}
"""By device and stream. On its stream a launch comes after what cleared its counters."""


def zero_counters(device: torch.device) -> torch.Tensor:
    """Return zeros for one launch on the current stream of `device`: int32, one for each of its
    multiprocessors and more."""
    if torch.cuda.is_current_stream_capturing():  # the graph must clear them each time it runs
        return _clear(1, device)[0]
    stream = triton.runtime.driver.active.get_current_stream(device.index)  # as launches find it
    rows = _cleared.setdefault((device.index, stream), [])
    try:
        return rows.pop()
    except IndexError:  # so, since another thread may have taken the last one
        rows.extend(_clear(_AT_ONCE, device))
        return rows.pop()


def _clear(count: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    return torch.zeros(count, _COUNTERS, dtype=torch.int32, device=device).unbind()
