"""Say why a first call takes long: on a GPU its kernels are compiled, once for a machine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE_SECONDS = 5.0
_log = logging.getLogger(__name__)


@contextmanager
def unless_done_in(seconds: float, call: Callable[[], object]) -> Iterator[None]:
    """Call `call` in a thread of its own once what runs inside has taken `seconds`."""
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


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
    with unless_done_in(patience_seconds, lambda: _log.warning(text, direction, patience_seconds)):
        yield
