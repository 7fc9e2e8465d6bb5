"""Plans: written by hand, checked in integers, the same bytes from the same content."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hexiseq_triton.errors import ConfigError, PlanError
from hexiseq_triton.planner import GroupPlan, IdleRank, Plan, RankShare, Split
from hexiseq_triton.planner.heads import kv_heads_of

PLAN = Plan.from_splits(
    [Split((30, 20, 14), (3, 3, 2)), Split((36,), (8,))], num_kv_heads=2, world_size=5
)


def test_by_hand_ranks_count_up_and_kv_heads_follow_from_query_heads() -> None:
    shares = PLAN.shares
    assert [s.rank for s in shares] == [0, 1, 2, 3]
    assert [s.q_heads for s in shares] == [(0, 3), (3, 6), (6, 8), (0, 8)]
    assert [s.kv_heads for s in shares] == [(0, 1), (0, 2), (1, 2), (0, 2)]
    assert PLAN.seq_len == 100
    assert [PLAN.replica_of(rank) for rank in range(5)] == [0, 0, 0, 0, None]


def test_no_query_heads_read_no_kv_heads() -> None:
    assert kv_heads_of((5, 5), 4) == (1, 1)


def test_a_plan_file_gives_the_same_plan_and_the_same_bytes(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == PLAN
    assert loaded.to_json() == PLAN.to_json() == (tmp_path / "plan.json").read_text()


def test_an_edited_plan_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(PLAN.to_json().replace('"tokens": 30', '"tokens": 31'))
    with pytest.raises(PlanError, match=r"plan\.json: was edited after it was written"):
        Plan.load(path)


def test_a_file_of_something_else_is_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("nodes: [{name: a, gpus: {H100-SXM: 8}}]\ninter_gb_per_s: 25\n")
    with pytest.raises(ConfigError, match=r"is no plan: .* begins with nodes, inter_gb_per_s; "):
        Plan.load(path)


def test_a_file_of_another_version_is_refused_by_its_version(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(json.loads(PLAN.to_json()) | {"version": 99}))
    with pytest.raises(ConfigError, match="version is 99"):
        Plan.load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.json: cannot be read"):
        Plan.load(tmp_path / "absent.json")


def with_share(index: int, **changes: Any) -> Plan:
    """Return PLAN with one rank of its first group changed."""
    first, second = PLAN.replicas[0].groups
    ranks = list(first.ranks)
    ranks[index] = replace(ranks[index], **changes)
    return replace(
        PLAN, replicas=(replace(PLAN.replicas[0], groups=(GroupPlan(tuple(ranks)), second)),)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: with_share(0, rank=3), r"ranks \[3\] stand in the plan more than once"),
        (lambda: with_share(0, rank=7), r"ranks \[7\] lie outside a world of 5"),
        (
            lambda: replace(PLAN, idle=(IdleRank(3),)),
            r"ranks \[3\] stand in the plan more than once",
        ),
        (lambda: replace(PLAN, idle=(IdleRank(5),)), r"ranks \[5\] lie outside a world of 5"),
        (lambda: with_share(1, tokens=21), "holds 101 tokens; 1 sequences of 100 are 100"),
        (lambda: with_share(1, tokens=-1), "rank 1 holds -1 tokens"),
        (lambda: with_share(2, q_heads=(5, 8), kv_heads=(1, 2)), "every head once"),
        (lambda: with_share(2, q_heads=(6, 9), kv_heads=(1, 3)), r"must lie in \[0, 8\)"),
        (lambda: with_share(0, kv_heads=(0, 2)), r"its query heads \(0, 3\) read \(0, 1\)"),
        (lambda: replace(PLAN, num_kv_heads=3), "8 query heads do not divide by 3 KV heads"),
        (lambda: replace(PLAN, replicas=()), "has no replica"),
        (lambda: replace(PLAN, world_size=0), "world_size is 0"),
        (lambda: replace(PLAN, version=2), "plan version 2"),
    ],
)
def test_validate_names_what_is_wrong(change: Callable[[], Plan], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        change().validate()


@pytest.mark.parametrize(
    ("splits", "options", "message"),
    [
        ([], {}, "at least one replica"),
        ([[Split((1, 2), (1,))]], {}, "2 token counts, 1 head counts and 2 ranks"),
        ([[Split((1,), (4,)), Split((1,), (3,))]], {}, "every head once"),
        ([[Split((1,), (4,))]], {"num_kv_heads": 3}, "must divide"),
        ([[Split((3,), (4,))], [Split((2,), (4,))]], {}, "replica 1 holds 2 tokens"),
        ([[Split((3,), (4,))]], {"sequences": (1, 1)}, "2 entries for 1 replicas"),
        ([[Split((3,), (4,))]], {"sequences": (0,)}, "0 sequences"),
        ([[Split((3,), (4,))]], {"head_dim": 0}, "head_dim is 0"),
    ],
)
def test_splits_that_contradict_themselves_are_refused(
    splits: list[list[Split]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_splits(*splits, **options)


def test_a_share_knows_its_head_counts() -> None:
    share = RankShare(0, 5, (3, 7), (0, 2))
    assert (share.num_q_heads, share.num_kv_heads) == (4, 2)
