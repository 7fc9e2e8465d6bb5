"""What ranks agree on over the store, before a collective could hang or compute something else.

Every rank posts a value, a leader joins them, all read the same list. And a rank that fails posts
why, so that the ranks waiting for it can say so.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from hexiseq_triton.errors import PeerError

_FAULT = "fault"
_ANSWER_MARGIN = timedelta(seconds=5)  # followers outwait the leader, who knows who is missing
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.05  # seconds between two looks at the store
_UNTROUBLED = 1.0  # seconds of a wait in which faults don't count: most answers come by then


def listed(ranks: Iterable[int], answers: Iterable[str]) -> str:
    """Return what each rank answered, a line each, for an error that all of them raise."""
    return "\n".join(
        f"  rank {rank}: {answer}" for rank, answer in zip(ranks, answers, strict=True)
    )


class Agreement:
    """Values that some ranks post under a name, each seen by all of them.

    Args:
        store: a store of this context's own (keys are not prefixed further).
        rank: this process.
        timeout: how long to wait for the slowest rank.
    """

    def __init__(self, store: dist.Store, rank: int, timeout: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._timeout = timeout
        self._turns: dict[str, int] = {}

    def gather(self, name: str, ranks: Sequence[int], value: str) -> list[str]:
        """Return the values of `ranks`, in their order; the same list on every one of them.

        Raises:
            PeerError: if a rank posts nothing within the timeout, which the message names, if a
                rank posts a fault meanwhile, or if the store died with the process that held it.
        """
        try:
            return self._gathered(name, ranks, value)
        except RuntimeError as error:
            raise PeerError(
                f"at '{name}' the store failed, its process may be dead: {error}"
            ) from error

    def _gathered(self, name: str, ranks: Sequence[int], value: str) -> list[str]:
        turn = self._turns.get(name, 0)
        self._turns[name] = turn + 1
        self._store.set(f"{name}/{turn}/{self._rank}", value)
        if turn:  # its answer is known here, so the leader has read this
            self._store.delete_key(f"{name}/{turn - 1}/{self._rank}")
        answer = f"{name}/{turn}/all"
        if self._rank == ranks[0]:
            self._store.set(answer, json.dumps(self._collected(f"{name}/{turn}", ranks)))
            if turn:  # all ranks are past the turn before
                self._store.delete_key(f"{name}/{turn - 1}/all")
        found = self._read(answer, self._timeout + _ANSWER_MARGIN)
        if found is None:
            missing = [ranks[0]]
        else:
            values = json.loads(found)
            missing = [rank for rank, item in zip(ranks, values, strict=True) if item is None]
        if missing:
            raise PeerError(
                f"ranks {missing} did not reach '{name}' within {self._timeout.total_seconds():g} s"
            )
        return list(values)

    def _collected(self, prefix: str, ranks: Sequence[int]) -> list[str | None]:
        keys = [f"{prefix}/{rank}" for rank in ranks]
        if self._come(keys, self._timeout):  # two calls of the store, however many ranks there are
            return [bytes(value).decode() for value in self._store.multi_get(keys)]
        return [self._read(key, timedelta(0)) for key in keys]

    def _read(self, key: str, timeout: timedelta) -> str | None:
        """Return what stands under a key; None if nothing does within the timeout."""
        return bytes(self._store.get(key)).decode() if self._come([key], timeout) else None

    def _come(self, keys: list[str], timeout: timedelta) -> bool:
        """Wait until something stands under every key; return whether it does within the timeout.

        Raises:
            PeerError: if a rank posts a fault before it does.
        """
        began = time.monotonic()
        pause = _FIRST_PAUSE
        # the store's own wait sees no fault, and logs two lines whenever its time is up
        while not self._store.check(keys):
            waited = time.monotonic() - began
            faulty = waited > _UNTROUBLED and keys != [_FAULT] and self._store.check([_FAULT])
            if faulty and not self._store.check(keys):  # what is known by now comes first
                raise PeerError(bytes(self._store.get(_FAULT)).decode())
            if waited >= timeout.total_seconds():
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return True

    def post_fault(self, message: str) -> None:
        """Tell the other ranks why this one stops; the first message stays."""
        with suppress(RuntimeError):  # the store may have died with its rank
            self._store.compare_set(_FAULT, "", message)

    def fault(self, patience: timedelta) -> str | None:
        """Return what the first failing rank said; wait up to `patience` for it."""
        try:
            return self._read(_FAULT, patience)
        except RuntimeError:  # as above
            return None
