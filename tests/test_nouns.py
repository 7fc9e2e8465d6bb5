"""What constructors of the planner's nouns refuse: with an error of the package, in one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from drawn_problems import TWO_AND_TWO

import hexiseq_triton.planner as planner
from hexiseq_triton.errors import ConfigError, PlanError
from hexiseq_triton.planner import Cluster, ExchangePlan, ModelSpec, Plan, Split, Workload, plan

CHECKED = [
    noun
    for name in planner.__all__
    if hasattr(noun := getattr(planner, name), "__pydantic_validator__")
]


@pytest.mark.parametrize("noun", CHECKED, ids=lambda noun: noun.__name__)
def test_every_public_noun_refuses_in_one_line(noun: type[Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        noun(magic=1)
    message = str(caught.value)
    assert f"{noun.__name__}: magic is no field here" in message
    assert "\n" not in message
    assert "http" not in message


def test_the_public_nouns_are_those_that_plans_and_models_consist_of() -> None:
    assert {noun.__name__ for noun in CHECKED} >= {"ExchangePlan", "ModelSpec", "Plan", "Split"}
    assert {noun.__name__ for noun in CHECKED} >= {"GpuSpec", "RankShare", "Workload"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Workload(True), "Workload: seq_len is True: a number is needed"),
        (lambda: Workload(8, global_batch=True), "Workload: global_batch is True: a number is"),
        (lambda: Workload(8, 3, 2), "Workload: global_batch 3 does not divide by accumulation 2"),
        (lambda: replace(Workload(8), seq_len=-1), "Workload: seq_len is -1: "),
        (lambda: ModelSpec(1, 2, 3, 1, 1), "ModelSpec: head_dim is 0: "),
        (lambda: Split((0, 1), "x"), "Split: heads is 'x': a list is needed"),
        (lambda: Split((1,), (2,), (0,), 4), "Split: 4 is one argument too many; give it by name"),
        (lambda: Split(), "Split: tokens is missing; Split: heads is missing"),
        (lambda: ExchangePlan("balanced", "x"), "ExchangePlan: chunk_tokens is 'x': "),
    ],
)
def test_an_error_names_the_field_its_value_and_what_fits(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_truth_is_no_length_and_an_argument_is_no_file() -> None:
    with pytest.raises(ConfigError, match=r"^seq_len is True: a number is needed$"):
        plan(TWO_AND_TWO, "tiny", seq_len=True)
    with pytest.raises(ConfigError, match=r"^seq_len is 0: "):
        plan(TWO_AND_TWO, "tiny", seq_len=0)


def test_a_plan_without_tokens_is_refused() -> None:
    with pytest.raises(PlanError, match="seq_len is 0; it must be at least 1"):
        Plan.from_splits([Split((0, 0), (4, 4))])


@pytest.mark.parametrize("name", ["", " ", "a\nb"])
def test_a_node_needs_a_name_of_one_line(name: str) -> None:
    with pytest.raises(ConfigError, match=r"nodes\.0\.name is .*: a node's name is text in one"):
        Cluster.from_mapping({"nodes": [{"name": name, "gpus": {"L4": 1}}]})
