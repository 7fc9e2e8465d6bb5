"""Units over ranks, for one phase and for two, against brute force over everything there is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from random import Random

import numpy as np
import pytest

from hexiseq_triton.planner.split import place, place_tokens

DRAWS = range(120)


def placed(
    units: int, forward: Sequence[float], backward: Sequence[float], caps: Sequence[int]
) -> list[int]:
    found = place(units, np.array(forward), np.array(backward), np.array(caps, dtype=np.int64))
    return [int(count) for count in found]


def tokens_placed(num_tokens: int, seconds: Sequence[float], caps: Sequence[int]) -> list[int]:
    rates = np.array(seconds)
    room = np.array(caps, dtype=np.int64)
    return [int(n) for n in place_tokens(num_tokens, rates, 0 * rates, room, 16)]


def all_choices(units: int, caps: Sequence[int]) -> Iterator[tuple[int, ...]]:
    choices = itertools.product(*(range(min(cap, units) + 1) for cap in caps))
    return (taken for taken in choices if sum(taken) == units)


def most(taken: Sequence[int], seconds: Sequence[float]) -> float:
    return max(count * rate for count, rate in zip(taken, seconds, strict=True))


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("phases", ["one", "proportional", "two"])
def test_placing_equals_brute_force(draw: int, phases: str) -> None:
    rng = Random(draw)
    count, units = rng.randint(1, 4), rng.randint(0, 10)
    speeds = [1e-6, 2e-6, 3.17e-6, rng.uniform(1e-7, 1e-5)]
    forward = [rng.choice(speeds) for _ in range(count)]
    backward = {
        "one": [0.0] * count,
        "proportional": [2 * seconds for seconds in forward],
        "two": [rng.choice(speeds) for _ in range(count)],
    }[phases]
    caps = [rng.randint(0, 10) for _ in range(count)]

    def seconds(taken: Sequence[int]) -> float:
        return most(taken, forward) + most(taken, backward)

    best = min((seconds(taken) for taken in all_choices(units, caps)), default=None)
    taken = placed(units, forward, backward, caps)
    if best is None:
        assert taken == [-1] * count
        return
    assert sum(taken) == units
    assert all(0 <= number <= cap for number, cap in zip(taken, caps, strict=True))
    assert seconds(taken) == pytest.approx(best, rel=1e-12)


def test_a_much_slower_rank_takes_no_heads() -> None:
    assert placed(8, [1.0, 1.0, 9.0], [0.0] * 3, [8] * 3) == [4, 4, 0]


def test_tokens_come_in_blocks_and_the_remainder_finds_room() -> None:
    tokens = tokens_placed(1003, [1.0, 2.0, 2.0], [1003] * 3)

    assert sum(tokens) == 1003
    assert sorted(count % 16 for count in tokens) == [0, 0, 1003 % 16]
    assert tokens[0] > 1.9 * tokens[1]


def test_memory_caps_bind_and_the_rest_moves_on() -> None:
    assert tokens_placed(1024, [1.0, 1.0], [160, 5000]) == [160, 864]


def test_too_little_room_is_said() -> None:
    assert tokens_placed(208, [1.0, 1.0], [100, 100]) == [-1, -1]


def test_room_too_tight_for_whole_blocks_is_filled_token_by_token() -> None:
    assert tokens_placed(208, [1.0, 1.0], [100, 108]) == [100, 108]


def test_equal_ranks_differ_by_one_unit_at_most() -> None:
    taken = placed(1000, [1.0, 3.1] * 48, [0.0] * 96, [1000] * 96)

    for ranks in (taken[::2], taken[1::2]):
        assert max(ranks) - min(ranks) <= 1
