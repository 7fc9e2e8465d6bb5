"""Say why a first call takes long: on a GPU its kernels are compiled, once for a machine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_SECONDS = 5.0
_log = logging.getLogger(__name__)


@contextmanager
def told_if_slow(direction: str, patience_seconds: float = PATIENCE_SECONDS) -> Iterator[None]:
    """Log a warning once what runs inside has taken `patience_seconds`.

    Args:
        direction: of attention, "forward" or "backward".
        patience_seconds: how long a call with compiled kernels never takes on the host.
    """
    text = (
        "compiling attention's kernels: the first %s takes longer than %g s; later runs on this "
        "machine find them in Triton's cache"
    )
    timer = threading.Timer(patience_seconds, _log.warning, (text, direction, patience_seconds))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
