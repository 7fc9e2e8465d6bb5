"""The Triton kernels against dense attention: in the interpreter, and on the card with `-m gpu`.

Without CUDA the shapes are small and the blocks too; with CUDA the same tests run full ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from assertions import assert_as_close_as
from kernel_runs import (
    DEVICE,
    MARKS,
    ON_CARD,
    Case,
    assert_matches_dense,
    at_once,
    chunks_of,
    errors,
    in_chunks,
)

from hexiseq_triton.kernels import forward, grad_kv, grad_q
from hexiseq_triton.kernels.backward import attention_backward
from hexiseq_triton.kernels.delta import row_dots
from hexiseq_triton.kernels.forward import attention_forward
from hexiseq_triton.kernels.options import MAX_SOFTCAP, placed

pytestmark = MARKS
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32

LENGTHS = [(1,), (63,), (127,), (128,), (129,), (257,)] + ([(1000,), (5000,)] if ON_CARD else [])
DOCUMENTS = [(0, 7, 61), (40, 0, 0, 25), (1, 65, 30, 0)]
GROUPS = [(1, 2), (3, 1), (7, 1), (8, 1)]
FEATURES: list[dict[str, Any]] = [
    {"causal": False},
    {"window": (20, -1)},
    {"causal": False, "window": (17, 9)},
    {"softcap": 2.0},
    {"softcap": 1.5, "causal": False, "scale": 0.3},
]
HEAD_DIMS = [8, 72, 128, 200, 256] + ([40, 64, 96] if ON_CARD else [])


@pytest.fixture(params=[False, True], ids=["pointers", "descriptors"])
def loader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with either loader."""
    for module in (forward, grad_kv, grad_q):
        chosen = module.config_for
        monkeypatch.setattr(
            module,
            "config_for",
            lambda *args, chosen=chosen: replace(chosen(*args), descriptors=request.param),
        )


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.usefixtures("loader")
def test_one_document_of_any_length(lengths: tuple[int, ...]) -> None:
    assert_matches_dense(Case(lengths))


@pytest.mark.parametrize("lengths", DOCUMENTS, ids=str)
@pytest.mark.usefixtures("loader")
def test_documents_and_empty_ones(lengths: tuple[int, ...]) -> None:
    assert_matches_dense(Case(lengths, kv_heads=2))


@pytest.mark.parametrize(("q_per_kv", "kv_heads"), GROUPS)
def test_grouped_heads(q_per_kv: int, kv_heads: int) -> None:
    assert_matches_dense(Case((70,), q_per_kv=q_per_kv, kv_heads=kv_heads))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [FP16, FP32], ids=["fp16", "fp32"])
def test_head_dimensions(head_dim: int, dtype: torch.dtype) -> None:
    assert_matches_dense(Case((70, 3), head_dim=head_dim, q_per_kv=1, dtype=dtype))


@pytest.mark.parametrize("num_chunks", [None, 2])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_blocks_without_a_mask_at_large_head_dimensions(
    head_dim: int, num_chunks: int | None
) -> None:
    length = 1500 if ON_CARD else 130
    assert_matches_dense(Case((length,), head_dim=head_dim, q_per_kv=1), num_chunks)


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("dtype", [FP16, FP32], ids=["fp16", "fp32"])
def test_masks_and_softcap(features: dict[str, Any], dtype: torch.dtype) -> None:
    assert_matches_dense(Case((90, 30), dtype=dtype, **features))


@pytest.mark.parametrize("softcap", [30.0, 1000.0, MAX_SOFTCAP])
def test_a_large_softcap_costs_float32_no_accuracy(softcap: float) -> None:
    assert_matches_dense(Case((90, 30), dtype=FP32, softcap=softcap, scale=1.0))


@pytest.mark.parametrize(("dtype", "num_chunks"), [(FP16, None), (FP32, None), (FP16, 2)], ids=str)
def test_a_sink_takes_its_share(num_chunks: int | None, dtype: torch.dtype) -> None:
    # so many heads that the RMS error of their sinks' gradients is not one of chance
    case = Case((50,), q_per_kv=8, dtype=dtype, window=(30, -1), sink=True)
    assert_matches_dense(case, num_chunks)


@pytest.mark.parametrize("num_chunks", [1, 2, 5, 16])
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=["fp16", "bf16", "fp32"])
def test_state_carried_through_chunks_in_any_order(num_chunks: int, dtype: torch.dtype) -> None:
    assert_matches_dense(Case((129, 20), q_per_kv=1, dtype=dtype), num_chunks)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
def test_sixteen_chunks_are_as_exact_as_one(dtype: torch.dtype) -> None:
    case = Case((1000,) if ON_CARD else (160,), q_per_kv=1, dtype=dtype)
    for many, one in zip(errors(case, 16), errors(case, 1), strict=True):
        assert many <= 1.1 * one


@pytest.mark.parametrize(
    ("lengths", "num_chunks"),
    [
        ((70, 0, 30), 5),
        ((330, 0, 60), 4),  # whole blocks of several chunks in one launch
        *([((5000, 0, 900), 17), ((2048,), 8)] if ON_CARD else []),
    ],
    ids=str,
)
@pytest.mark.usefixtures("loader")
def test_one_launch_sees_chunks_anywhere_in_a_pool(
    lengths: tuple[int, ...], num_chunks: int
) -> None:
    """Two launches, each of about half of the chunks, whose rows stand apart in NaN."""
    case = Case(lengths, q_per_kv=2)
    q, k, v, do = inputs = case.inputs()
    o, dq, dk, dv, lse = in_chunks(case, inputs, 1)
    chunks = list(chunks_of(case, num_chunks))
    pool_rows = sum(lengths) + 10 * num_chunks
    pool = torch.full((2, pool_rows, 1, 64), torch.nan, dtype=k.dtype, device=DEVICE)
    held, row = [], 3
    for rows, segments in chunks:
        size = rows.stop - rows.start
        pool[:, row : row + size] = torch.stack([k[rows], v[rows]])
        held.append((slice(row, row + size), placed(segments, row)))
        row += size + 7
    parts = slice(num_chunks // 2), slice(num_chunks // 2, num_chunks)
    halves = [sum((segments for _, segments in held[part]), ()) for part in parts]

    found = torch.full_like(o, torch.nan), torch.full_like(lse, torch.nan)
    for i, segments in enumerate(halves):
        attention_forward(q, *pool, *found, case.segments, segments, *case.call, first=i == 0)
    torch.testing.assert_close(found, (o, lse), rtol=2e-3, atol=2e-3)

    delta = row_dots(do, o)
    grads = torch.zeros(2, pool_rows, 1, 64, device=DEVICE)
    dq_found = torch.zeros_like(dq)
    for segments in halves:
        attention_backward(
            q, *pool, do, lse, delta, dq_found, *grads, case.segments, segments, *case.call
        )
    torch.testing.assert_close(dq_found, dq, rtol=1e-3, atol=1e-3)
    for (rows, _), (stands_at, _) in zip(chunks, held, strict=True):
        own = torch.stack([dk[rows], dv[rows]])
        torch.testing.assert_close(grads[:, stands_at], own, rtol=1e-3, atol=1e-3)
        grads[:, stands_at] = 0.0
    assert (grads == 0).all()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("head_dim", [64, 128] if ON_CARD else [64])
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.usefixtures("loader")
def test_documents_do_not_leak_into_each_other(poison: float, head_dim: int) -> None:
    """All tensors of the middle document are poisoned; its neighbours notice nothing."""
    lengths = (40, 70, 33)
    case = Case(lengths, head_dim=head_dim, q_per_kv=2)
    clean = case.inputs()
    expected = at_once(case, clean)
    for x in clean:
        x[40:110] = poison
    poisoned = at_once(case, clean)
    for a, b in zip(poisoned[:4], expected[:4], strict=True):
        assert torch.equal(a[:40], b[:40])
        assert torch.equal(a[110:], b[110:])


@pytest.mark.skipif(not ON_CARD, reason="needs 9 GB")
@pytest.mark.parametrize("dim", ["token", "head"])
def test_views_may_pass_two_to_the_31_elements(dim: str) -> None:
    case = Case((600,), kv_heads=2, q_per_kv=1)
    q, k, v, do = case.inputs()
    exact, lowp = (case.dense((q, k, v, do), dtype) for dtype in (torch.float64, case.dtype))
    strides = (1 << 22, 64, 1) if dim == "token" else (64, (1 << 31) + 64, 1)
    wide = torch.zeros((1 << 31) + (1 << 29), dtype=FP16, device=DEVICE)
    for i, x in enumerate((q, k, v)):
        view = wide.as_strided(x.shape, strides, 128 * 600 * i if dim == "head" else 128 * i)
        view.copy_(x)
        moved = [view if j == i else y for j, y in enumerate((q, k, v, do))]
        for found, *expected in zip(in_chunks(case, moved, 1), exact, lowp, strict=False):
            assert_as_close_as(found, *expected)
