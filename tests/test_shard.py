"""Shards: shifted labels, positions per document, the exact batch back, one batch for all ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pool import TIMEOUT, Pool

from hexiseq_triton.context import init
from hexiseq_triton.errors import HexiSeqError, InputError
from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.planner import Plan, Split

PLAN = Plan.from_splits(
    [Split((9, 0, 5), (3, 3, 2)), Split((10,), (8,))], num_kv_heads=2, world_size=5
)
LENGTHS = [5, 0, 1, 13, 5]
IDS = torch.arange(100, 124)
LABELS = torch.arange(100, 124)


def shard_and_back(rank: int) -> dict[str, Any]:
    """Worker: shard a packed batch; return the local tensors and the global ones made from them."""
    with init(PLAN, device="cpu", timeout=TIMEOUT) as context:
        cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0)
        batch = context.shard({"input_ids": IDS, "labels": LABELS}, cu_seqlens=cu_seqlens)
        layout = batch.layout
        return {
            "local": batch["input_ids"],
            "cu_seqlens": batch.cu_seqlens,
            "num_segments": len(layout.segments),
            "ids": context.unshard(batch["input_ids"], layout),
            "labels": context.unshard(batch["labels"], layout),
            "positions": context.unshard(batch.position_ids, layout),
            "features": context.unshard(batch["input_ids"][:, None] * torch.ones(3), layout),
        }


def test_a_batch_comes_back_exactly(pool: Pool) -> None:
    found = pool.run(shard_and_back)
    assert [len(f["local"]) for f in found] == [9, 0, 5, 10, 0]
    for result in found[:4]:
        assert torch.equal(result["ids"], IDS)
        assert torch.equal(result["features"], IDS[:, None] * torch.ones(3))
        positions = torch.cat([torch.arange(length) for length in LENGTHS])
        assert torch.equal(result["positions"], positions)
        assert result["cu_seqlens"].dtype == torch.int32
        assert result["cu_seqlens"][-1] == len(result["local"])
        assert len(result["cu_seqlens"]) == result["num_segments"] + 1
    assert len(found[4]["ids"]) == 0  # the idle rank


def test_labels_are_shifted_before_the_cut_and_never_across_documents(pool: Pool) -> None:
    expected = []
    start = 0
    for length in LENGTHS:
        document = LABELS[start : start + length].tolist()
        expected += [*document[1:], -100] if document else []
        start += length
    assert pool.run(shard_and_back)[0]["labels"].tolist() == expected


def shard_rows_of_a_batch(rank: int) -> list[int]:
    """Worker: a [B, S] batch is B documents."""
    plan = Plan.from_splits([Split((4, 4), (1, 1)), Split((4,), (2,))], world_size=5)
    with init(plan, device="cpu", timeout=TIMEOUT) as context:
        ids = torch.arange(12).view(3, 4)
        batch = context.shard({"input_ids": ids, "labels": ids})
        labels: list[int] = context.unshard(batch["labels"], batch.layout).tolist()
        return labels


def test_each_row_of_a_batch_is_a_document(pool: Pool) -> None:
    found = pool.run(shard_rows_of_a_batch)
    assert found[0] == [1, 2, 3, -100, 5, 6, 7, -100, 9, 10, 11, -100]


def shard_from_source(rank: int, source: int) -> list[int]:
    """Worker: only the source rank has the batch."""
    with init(PLAN, device="cpu", timeout=TIMEOUT) as context:
        has_it = rank == source
        batch = context.shard(
            {"input_ids": IDS} if has_it else None,
            cu_seqlens=torch.tensor([0, 11, 24]) if has_it else None,
            source=source if rank < 4 else None,
        ) if rank < 4 else None  # fmt: skip
        if batch is None:
            return []
        ids: list[int] = context.unshard(batch["input_ids"], batch.layout).tolist()
        return ids


@pytest.mark.parametrize("source", [0, 2])
def test_one_rank_can_give_the_batch_to_all(pool: Pool, source: int) -> None:
    assert pool.run(shard_from_source, source)[:4] == [IDS.tolist()] * 4


def shard_from_sources(rank: int, sources: list[int | None], has_it: list[int]) -> None:
    """Worker: each rank names its own source."""
    with init(PLAN, device="cpu", timeout=TIMEOUT) as context:
        batch = {"input_ids": IDS} if rank in has_it else None
        context.shard(batch, source=sources[rank])


@pytest.mark.parametrize(
    ("sources", "has_it", "says"),
    [
        ([0, 0, 1, 0, 0], [0, 4], "the ranks of replica 0 name different sources"),
        ([None, 0, None, None, None], [0, 2, 3, 4], "the ranks of replica 0 name different"),
        ([4] * 5, [4], "rank 0: source is 4; replica 0 has positions 0 to 3"),
    ],
)
def test_sources_that_differ_or_do_not_exist_raise_the_same_error(
    pool: Pool, sources: list[int | None], has_it: list[int], says: str
) -> None:
    outcomes = pool.outcomes(shard_from_sources, sources, has_it)
    assert outcomes[4].kind == ""  # the idle rank has a batch of its own
    assert {outcome.kind for outcome in outcomes[:4]} == {"InputError"}
    assert len({outcome.error for outcome in outcomes[:4]}) == 1
    assert outcomes[0].error.startswith(says)


def test_an_idle_rank_without_a_batch_hears_that_nobody_sends_one(pool: Pool) -> None:
    outcomes = pool.outcomes(shard_from_sources, [0] * 5, [0])
    assert outcomes[4].kind == "InputError"
    assert {outcome.kind for outcome in outcomes[:4]} <= {"", "PeerError"}  # a late one hears of it
    assert "this rank is idle, nobody sends it a batch" in outcomes[4].error


def shard_differently(rank: int, how: str) -> None:
    """Worker: rank 1 comes with another batch."""
    with init(PLAN, device="cpu", timeout=TIMEOUT) as context:
        ids, cu_seqlens = IDS.clone(), torch.tensor([0, 24])
        if rank == 1 and how == "ids":
            ids[7] += 1
        if rank == 1 and how == "documents":
            cu_seqlens = torch.tensor([0, 12, 24])
        if rank == 1 and how == "malformed":
            cu_seqlens = torch.tensor([0, 25])
        context.shard({"input_ids": ids}, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("ids", "the ranks of replica 0 hold different batches"),
        ("documents", "the ranks of replica 0 hold different batches"),
        ("malformed", "rank 1: cu_seqlens ends at 25; the batch has 24 tokens"),
    ],
)
def test_different_batches_raise_the_same_error_on_every_rank(
    pool: Pool, how: str, says: str
) -> None:
    outcomes = pool.outcomes(shard_differently, how)[:4]
    assert {outcome.kind for outcome in outcomes} == {"InputError"}
    assert len({outcome.error for outcome in outcomes}) == 1
    assert outcomes[0].error.startswith(says)


BAD_BATCHES: dict[str, tuple[Any, Any]] = {
    "the batch is empty": ({}, None),
    r"labels has shape \(3,\)": ({"input_ids": torch.zeros(4), "labels": torch.zeros(3)}, None),
    "must begin with 0 and never fall": ({"x": torch.zeros(4)}, torch.tensor([0, 3, 2, 4])),
    "cu_seqlens is torch.float32": ({"x": torch.zeros(4)}, torch.tensor([0.0, 4.0])),
    "cu_seqlens is a list": ({"x": torch.zeros(4)}, [0, 4]),
    r"scale is tensor\(2.\), a Tensor": ({"x": torch.zeros(4), "scale": torch.tensor(2.0)}, None),
    "mask is None, a NoneType": ({"x": torch.zeros(4), "mask": None}, None),
    "the batch is a Tensor": (torch.zeros(4), None),
    "labels are torch.uint8, which cannot hold -100": (
        {"labels": torch.zeros(4, dtype=torch.uint8)},
        None,
    ),
}


@pytest.mark.parametrize("message", BAD_BATCHES)
def test_a_malformed_batch_is_named(message: str) -> None:
    from hexiseq_triton.shard import _as_stream

    with pytest.raises(InputError, match=message):
        _as_stream(*BAD_BATCHES[message])


def unshard_wrongly(rank: int) -> list[str]:
    """Worker: return what two wrong calls say."""
    said = []
    for bad in (torch.zeros(3), torch.zeros(24, requires_grad=True)):
        with init(PLAN, device="cpu", timeout=TIMEOUT) as context:
            batch = context.shard({"input_ids": IDS}, cu_seqlens=torch.tensor([0, 24]))
            # the idle rank shards alone: what it is told below must not end the others' sharding
            context.gather("all have sharded", "")
            try:
                context.unshard(bad, batch.layout)
            except ValueError as error:
                said.append(str(error))
    return said


def test_unshard_refuses_what_it_cannot_do(pool: Pool) -> None:
    first = pool.run(unshard_wrongly)[0]
    assert first == [
        "local has shape (3,); rank 0 holds 9 rows",
        "unshard carries no gradient; pass local.detach()",
    ]


def unshard_differently(rank: int) -> None:
    """Worker: rank 2 comes with another dtype, so its rows would be read as others."""
    with init(PLAN, device="cpu", timeout=TIMEOUT) as context:
        batch = context.shard({"input_ids": IDS})
        local = batch["input_ids"].to(torch.float32 if rank == 2 else torch.float64)
        context.unshard(local, batch.layout)


def test_tensors_of_different_dtypes_are_not_unsharded(pool: Pool) -> None:
    outcomes = pool.outcomes(unshard_differently)[:4]
    assert {outcome.kind for outcome in outcomes} == {"InputError"}
    assert len({outcome.error for outcome in outcomes}) == 1
    assert "rank 2: torch.float32 with inner shape (), of batch 0 of 24 tokens" in outcomes[0].error


def unshard_another(rank: int) -> None:
    """Worker: rank 1 comes with rows of the batch before, of as many tokens."""
    with init(PLAN, device="cpu", timeout=TIMEOUT) as context:
        batches = [
            context.shard({"input_ids": IDS}, cu_seqlens=torch.tensor(bounds))
            for bounds in ([0, 24], [0, 5, 24])
        ]
        batch = batches[0 if rank == 1 else 1]
        context.unshard(batch["input_ids"], batch.layout)


def test_rows_of_different_batches_are_not_unsharded(pool: Pool) -> None:
    outcomes = pool.outcomes(unshard_another)[:4]
    assert {outcome.kind for outcome in outcomes} == {"InputError"}
    assert "rank 1: torch.int64 with inner shape (), of batch 0 of" in outcomes[0].error


def unshard_by_another_context(rank: int) -> str:
    """Worker: what a context says to a layout of one before."""
    with init(PLAN, device="cpu", timeout=TIMEOUT) as context:
        batch = context.shard({"input_ids": IDS})
    with init(replace(PLAN), device="cpu", timeout=TIMEOUT) as context:
        try:
            context.unshard(batch["input_ids"], batch.layout)
        except HexiSeqError as error:  # maybe what another rank says of it
            return str(error)
    return "accepted"


def test_a_layout_of_another_context_is_refused(pool: Pool) -> None:
    for said in pool.run(unshard_by_another_context):
        assert "the layout belongs to another context" in said


@pytest.mark.parametrize(
    ("rank", "lengths", "message"),
    [(0, [29, -5], "a document has -5 tokens"), (5, [24], "rank is 5; the plan has 5")],
)
def test_a_layout_that_cannot_be_is_refused(rank: int, lengths: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        BatchLayout(PLAN, rank, lengths)
