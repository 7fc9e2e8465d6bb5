"""The Gluon kernels for Hopper: their machine code anywhere, their results on the card."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate, groupby
from pathlib import Path

import pytest
import torch
from assertions import assert_as_close_as
from kernel_runs import DEVICE, ON_CARD, Case, chunks_of

from hexiseq_triton.kernels.backward import attention_backward
from hexiseq_triton.kernels.delta import row_dots
from hexiseq_triton.kernels.forms import forms
from hexiseq_triton.kernels.forward_call import ForwardCall
from hexiseq_triton.kernels.hopper import guard
from hexiseq_triton.kernels.hopper.order import work_order
from hexiseq_triton.kernels.interned import interned
from hexiseq_triton.kernels.tilemap import TILE_FIELDS, build_map
from hexiseq_triton.segments import Mask, whole_documents

SCRIPT = Path(__file__).resolve().parent.parent / "bench" / "compile_hopper.py"
BF16, FP16 = torch.bfloat16, torch.float16
ON_HOPPER = ON_CARD and torch.cuda.get_device_capability() == (9, 0)
on_hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_HOPPER, reason="needs a card of compute capability 9.0"),
]
CARD = torch.device("cuda", 0)


@pytest.mark.parametrize(
    "variant",
    ["forward 128 between", "backward 128 plain", "grad_kv 256 plain", "grad_q 256 plain"],
)
def test_hot_loops_neither_spill_nor_wait(variant: str) -> None:
    """`make compile-all` does the same for every variant."""
    command = [sys.executable, str(SCRIPT), "--only", variant]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}  # its own process: compiled, not run
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert variant in done.stdout


@pytest.fixture
def a_hopper_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the guard believe in a card; forget what it decided."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(guard, "_spilled", set())
    for cached in (guard._runs, guard._verified):
        cached.cache_clear()
    yield
    for cached in (guard._runs, guard._verified):
        cached.cache_clear()


@pytest.mark.usefixtures("a_hopper_card")
@pytest.mark.parametrize(
    ("direction", "dtype", "head_dim", "expected"),
    [
        ("forward", BF16, 256, True),
        ("backward", BF16, 256, False),
        ("grad_kv", BF16, 256, True),
        ("grad_kv", BF16, 64, False),
        ("grad_q", BF16, 128, False),
        ("forward", torch.float32, 128, False),
        ("forward", FP16, 96, False),
    ],
)
def test_the_guard_knows_what_was_verified(
    direction: str, dtype: torch.dtype, head_dim: int, expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(guard.triton, "__version__", "3.6.0")
    assert guard._runs(direction, CARD, dtype, head_dim) is expected


@pytest.mark.parametrize("version", ["3.6.0", "3.6.9", "3.7.1", "3.7.1+gitabc", "3.8.0"])
def test_versions_that_were_verified(version: str) -> None:
    assert guard.is_verified(version)


@pytest.mark.parametrize("version", ["3.60.0", "3.7.0", "3.7.10", "3.8.1", "4.6.0"])
def test_versions_that_were_not_verified(version: str) -> None:
    assert not guard.is_verified(version)


@pytest.mark.usefixtures("a_hopper_card")
def test_another_triton_takes_the_portable_kernels_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(guard.triton, "__version__", "3.60.0")
    with caplog.at_level(logging.WARNING):
        assert not guard._runs("forward", CARD, BF16, 128)
        assert not guard._runs("backward", CARD, BF16, 128)
    assert [r.getMessage() for r in caplog.records] == [
        "Triton 3.60.0 is not among the versions verified for the Hopper kernels "
        "(3.6, 3.7.1, 3.8.0): the portable kernels run"
    ]


@pytest.mark.usefixtures("a_hopper_card")
def test_a_kernel_that_spills_is_not_taken_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(guard.triton, "__version__", "3.6.0")
    kind = ("forward", BF16, 128)
    guard.check(kind, guard.MOST_SPILLS)
    assert guard._runs("forward", CARD, BF16, 128)
    with caplog.at_level(logging.WARNING):
        guard.check(kind, 400)
        guard.check(kind, 400)
    assert not guard._runs("forward", CARD, BF16, 128)
    assert guard._runs("backward", CARD, BF16, 128)
    assert len(caplog.records) == 1
    assert "keeps 400 registers in memory" in caplog.records[0].getMessage()


def items_of(lengths: tuple[int, ...], num_kv_heads: int) -> tuple[list[int], list[int], list[int]]:
    """Return document, tile and KV head of each work item of causal documents, in order."""
    segments = whole_documents(lengths)
    table, num_tiles = build_map(segments, segments, Mask(0, None), 128, 64)
    order = work_order(table, num_tiles, segments, num_kv_heads, 132, 64)
    tiles, heads, _ = order.T.tolist()
    starts = list(accumulate(lengths))
    return [bisect_right(starts, table[TILE_FIELDS * tile]) for tile in tiles], tiles, heads


@pytest.mark.parametrize("lengths", [(4096,), (1000, 300, 3000, 5), (64,) * 50], ids=str)
@pytest.mark.parametrize("num_kv_heads", [1, 3, 8])
def test_every_work_item_comes_once_and_documents_follow_each_other(
    lengths: tuple[int, ...], num_kv_heads: int
) -> None:
    documents, tiles, heads = items_of(lengths, num_kv_heads)
    num_tiles = sum(-(-length // 128) for length in lengths)
    every = [(tile, head) for tile in range(num_tiles) for head in range(num_kv_heads)]
    assert sorted(zip(tiles, heads, strict=True)) == every
    assert [d for d, _ in groupby(documents)] == list(dict.fromkeys(documents))


def test_heads_take_turns_only_where_the_end_would_be_uneven() -> None:
    documents, _, heads = items_of((9000, 5000, 64), 8)
    first = [head for head, d in zip(heads, documents, strict=True) if d == documents[0]]
    assert first == sorted(first)
    _, tiles, _ = items_of((4096,), 8)
    assert tiles == sorted(tiles)


def test_every_round_over_a_document_walks_back_where_the_last_one_came() -> None:
    segments = whole_documents((3000, 500))
    table, num_tiles = build_map(segments, segments, Mask(0, None), 128, 64)
    directions = work_order(table, num_tiles, segments, 1, 10, 64)[:, 2].tolist()
    assert directions == [0] * 10 + [1] * 10 + [0] * 4 + [0] * 4


CASES = {
    "long": Case((1000,), head_dim=128, dtype=BF16),
    "documents": Case((1, 129, 65, 300, 0, 127), head_dim=128, q_per_kv=3, kv_heads=2),
    "window": Case((500, 77), head_dim=128, window=(130, -1), dtype=BF16),
    "softcap": Case((300, 33), head_dim=128, softcap=5.0, dtype=BF16),
    "both sides": Case((400, 1), causal=False, window=(17, 90)),
    "full": Case((257, 64), causal=False, dtype=BF16),
    "wide": Case((300, 1, 129), head_dim=256, q_per_kv=3, kv_heads=2, dtype=BF16),
    "wide window, softcap": Case((333,), head_dim=256, window=(70, -1), softcap=5.0),
    "many heads": Case((300,), kv_heads=2, q_per_kv=7),
}


def gradients(case: Case, num_chunks: int, repeatable: bool) -> list[torch.Tensor]:
    """Return o, dq, dk and dv by the Hopper kernels, with state carried through shuffled chunks."""
    from hexiseq_triton.kernels.hopper import forward

    q, k, v, do = case.inputs()
    o, out = (torch.full(q.shape, torch.nan, device=DEVICE, dtype=t) for t in (None, case.dtype))
    lse = torch.full((q.shape[1], q.shape[0]), torch.nan, device=DEVICE)
    chunks = list(chunks_of(case, num_chunks))
    for i, (rows, segments) in enumerate(chunks):
        last = i == num_chunks - 1
        tensors = (q, k[rows], v[rows], o, lse, out if last else o)
        call = ForwardCall(
            *forms(tensors), None, interned(case.segments), interned(segments), *case.call,
            first=i == 0, last=last, sm_margin=0,
        )  # fmt: skip
        run = forward.prepare(call)
        assert run is not None
        run(*tensors)
    delta = row_dots(do, out)
    dq, dk, dv = (torch.zeros(x.shape, device=DEVICE) for x in (q, k, v))
    for rows, segments in chunks:
        attention_backward(
            q, k[rows], v[rows], do, lse, delta, dq, dk[rows], dv[rows],
            case.segments, segments, *case.call, deterministic=repeatable,
        )  # fmt: skip
    return [out, dq, dk, dv]


@pytest.mark.parametrize("repeatable", [False, True], ids=["fused", "repeatable"])
@pytest.mark.parametrize("num_chunks", [1, 3])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
class TestOnTheCard:
    pytestmark = on_hopper

    def test_results_match_dense_attention(
        self, case: Case, num_chunks: int, repeatable: bool
    ) -> None:
        found = gradients(case, num_chunks, repeatable)
        exact, lowp = (case.dense(case.inputs(), t) for t in (torch.float64, case.dtype))
        for a, b, c in zip(found, exact, lowp, strict=True):
            assert_as_close_as(a, b, c)

    def test_repeats_bitwise_but_for_the_fused_dq(
        self, case: Case, num_chunks: int, repeatable: bool
    ) -> None:
        first = gradients(case, num_chunks, repeatable)
        for _ in range(10):
            again = gradients(case, num_chunks, repeatable)
            for i in (0, 1, 2, 3) if repeatable else (0, 2, 3):
                assert torch.equal(first[i], again[i])
