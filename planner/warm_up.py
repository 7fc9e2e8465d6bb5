"""Compile the search's inner loops, once for each machine, and say so if it takes a while.

numba keeps what it compiled by the date of each loop's own file, and does not see that a loop calls
one in another file. Who edits one by hand deletes `planner/__pycache__`; an installation is dated
anew as a whole.
"""

from __future__ import annotations

import sys
from functools import cache
from threading import Timer

import numpy as np

_PATIENCE_SECONDS = 1.5


@cache
def warm_up() -> None:
    """Load the compiled loops from numba's cache, or compile them: some ten seconds, once."""
    slow = Timer(
        _PATIENCE_SECONDS,
        lambda: print("hexiseq: compiling the planner, once for this machine", file=sys.stderr),
    )
    slow.daemon = True
    slow.start()
    try:
        from hexiseq_triton.planner import estimate, group_time, inner
        from hexiseq_triton.planner.speeds import (
            HEADS,
            LAYER_FORWARD,
            PEER_FIXED,
            Q_PER_KV,
        )

        by_rank = np.ones((2, LAYER_FORWARD + 1))
        shared = np.ones(PEER_FIXED + 1)
        shared[[HEADS, Q_PER_KV]] = 2, 1
        members = group_time.Members(
            by_rank, np.zeros(2, dtype=np.int64), shared, np.zeros((5, 5)), 0.0
        )
        tokens, heads = inner.split_group(2, 1, members)
        group_time.directions(tokens, heads, group_time.kv_heads_held(heads, 1), members)
        rates = estimate.group_rates(2, 1, members)[None, : estimate.BACKWARD + 1]
        estimate.layer_seconds(2, rates.copy(), np.ones((1, 2)))
        estimate.contiguous_seconds(2, 2, rates.copy(), np.ones((1, 2)))
    finally:
        slow.cancel()
