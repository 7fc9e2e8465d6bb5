"""Words of messages."""

from __future__ import annotations


def counted(number: int, noun: str, ending: str = "s") -> str:
    """Return "1 rank", "2 ranks", or with the ending "es" "2 processes"."""
    return f"{number} {noun}{'' if number == 1 else ending}"
