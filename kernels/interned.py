"""Segment lists as keys that cost nothing to look up, however many documents there are.

The hash of a tuple is computed anew each time, document by document. Here equal tuples lead to one
object, which hashes by identity, and the same tuple leads there without being read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from hexiseq_triton.kernels.options import PlacedSegment, Segments
from hexiseq_triton.segments import Segment

_Tuple = tuple[Segment, ...] | tuple[PlacedSegment, ...]

MOST_KNOWN = 512


@dataclass(frozen=True, eq=False)
class Interned:
    """One of all equal segment lists."""

    segments: _Tuple


_known: dict[int, tuple[_Tuple, Interned]] = {}
"""By the id of a tuple, which cannot pass to another object while the tuple stands here."""


def interned(segments: Segments) -> Interned:
    """Return the one object that stands for segments equal to these.

    Tuples are remembered; a list may change, so it is read each time.
    """
    if type(segments) is not tuple:
        return _by_value(tuple(segments))
    known = _known.get(id(segments))
    if known is None:
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        known = _known[id(segments)] = (segments, _by_value(segments))
    return known[1]


@lru_cache(maxsize=MOST_KNOWN)
def _by_value(segments: _Tuple) -> Interned:
    return Interned(segments)
