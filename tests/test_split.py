"""The token and head split against brute force over everything there is."""

from __future__ import annotations

import itertools
from random import Random

import pytest

from hexiseq_triton.errors import InfeasibleError
from hexiseq_triton.planner import split
from hexiseq_triton.planner.split import split_heads, split_tokens, split_units

DRAWS = range(120)


def brute_force(units: int, seconds: list[float], caps: list[int]) -> float | None:
    choices = itertools.product(*(range(min(cap, units) + 1) for cap in caps))
    return min((makespan(taken, seconds) for taken in choices if sum(taken) == units), default=None)


def makespan(taken: tuple[int, ...] | list[int], seconds: list[float]) -> float:
    return max(count * rate for count, rate in zip(taken, seconds, strict=True))


@pytest.mark.parametrize("draw", DRAWS)
def test_split_equals_brute_force(draw: int) -> None:
    rng = Random(draw)
    count, units = rng.randint(1, 4), rng.randint(0, 10)
    speeds = [1e-6, 2e-6, 3.17e-6, rng.uniform(1e-7, 1e-5)]
    seconds = [rng.choice(speeds) for _ in range(count)]
    caps = [rng.randint(0, 10) for _ in range(count)]
    best = brute_force(units, seconds, caps)

    if best is None:
        with pytest.raises(InfeasibleError):
            split_units(units, seconds, caps)
        return
    taken = split_units(units, seconds, caps)

    assert sum(taken) == units
    assert all(0 <= number <= cap for number, cap in zip(taken, caps, strict=True))
    assert makespan(taken, seconds) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("lie", ["everything on the slowest", "nothing at all"])
def test_a_solver_that_lies_is_put_right(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    last = 17 if lie == "everything on the slowest" else 0
    monkeypatch.setattr(split, "_solve", lambda units, classes: [0, 0, last])
    split._makespan.cache_clear()

    taken = split_units(17, [1.0, 2.0, 3.03], [17, 17, 17])

    assert makespan(taken, [1.0, 2.0, 3.03]) == brute_force(17, [1.0, 2.0, 3.03], [17, 17, 17])
    split._makespan.cache_clear()


def test_the_solver_alone_finds_the_least_makespan() -> None:
    rng = Random(3)
    for _ in range(20):
        seconds = [rng.uniform(10, 60) for _ in range(3)]
        classes = [((rate, 9), 1) for rate in seconds]

        assert makespan(split._solve(9, classes), seconds) == pytest.approx(
            brute_force(9, seconds, [9, 9, 9])
        )


def test_a_much_slower_rank_takes_no_heads() -> None:
    assert split_heads(8, [1.0, 1.0, 9.0]) == [4, 4, 0]


def test_tokens_come_in_blocks_and_the_remainder_finds_room() -> None:
    tokens = split_tokens(1003, [1.0, 2.0, 2.0])

    assert sum(tokens) == 1003
    assert sorted(count % 16 for count in tokens) == [0, 0, 1003 % 16]
    assert tokens[0] > 1.9 * tokens[1]


def test_memory_caps_bind_and_the_rest_moves_on() -> None:
    assert split_tokens(1024, [1.0, 1.0], caps=[160, 5000]) == [160, 864]


def test_too_little_room_is_infeasible_with_both_numbers() -> None:
    with pytest.raises(InfeasibleError, match=r"room for 200 tokens; 208 must be placed"):
        split_tokens(208, [1.0, 1.0], caps=[100, 100])


def test_room_too_tight_for_whole_blocks_is_filled_token_by_token() -> None:
    assert split_tokens(208, [1.0, 1.0], caps=[100, 108]) == [100, 108]


def test_equal_ranks_differ_by_one_unit_at_most() -> None:
    taken = split_units(1000, [1.0, 3.1] * 48, [1000] * 96)

    for ranks in (taken[::2], taken[1::2]):
        assert max(ranks) - min(ranks) <= 1
