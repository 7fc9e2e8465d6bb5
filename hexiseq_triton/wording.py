"""Numbers in sentences."""

from __future__ import annotations


def counted(number: int, noun: str, ending: str = "s") -> str:
    """Return "1 rank", "2 ranks", or with the ending "es" "2 processes"."""
    return f"{number} {noun}{'' if number == 1 else ending}"


def span(least: float, most: float, shape: str) -> str:
    """Return "3% to 5%", or "3%" where both look alike in this format."""
    first, last = f"{least:{shape}}", f"{most:{shape}}"
    return first if first == last else f"{first} to {last}"
