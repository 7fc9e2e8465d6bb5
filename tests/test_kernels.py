"""The Triton kernels against dense attention: in the interpreter, and on the card with `-m gpu`.

Without CUDA the shapes are small and the blocks too; with CUDA the same tests run full ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from assertions import assert_as_close_as
from kernel_runs import (
    ALIKE,
    DEVICE,
    ON_CARD,
    Case,
    assert_matches_dense,
    at_once,
    chunks_of,
    errors,
    in_chunks,
)

from hexiseq_triton.kernels import (
    AttentionOptions,
    HeadMap,
    backward,
    forward,
    grad_kv,
    grad_q,
    launch_tables,
)
from hexiseq_triton.kernels.backward import attention_backward
from hexiseq_triton.kernels.delta import row_dots
from hexiseq_triton.kernels.forward import attention_forward
from hexiseq_triton.kernels.hopper import guard
from hexiseq_triton.kernels.options import MAX_SOFTCAP, placed
from hexiseq_triton.segments import CAUSAL, FULL, Segment

pytestmark = [
    # the interpreter turns one-element arrays into scalars, and takes exp and log of empty rows
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    *([pytest.mark.gpu] if ON_CARD else []),
]
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


@pytest.mark.parametrize("num_chunks", [1, 2, 5, 16])
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=["fp16", "bf16", "fp32"])
def test_state_carried_through_chunks_in_any_order(num_chunks: int, dtype: torch.dtype) -> None:
    assert_matches_dense(Case((129, 20), q_per_kv=1, dtype=dtype), num_chunks)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
def test_sixteen_chunks_are_as_exact_as_one(dtype: torch.dtype) -> None:
    case = Case((1000,) if ON_CARD else (160,), q_per_kv=1, dtype=dtype)
    for many, one in zip(errors(case, 16), errors(case, 1), strict=True):
        assert many <= 1.1 * one


@pytest.mark.parametrize(("start", "stop"), [(0, 3), (3, 6), (6, 8), (2, 7)])
def test_a_head_interval_equals_its_slice_of_all_heads(start: int, stop: int) -> None:
    case = Case((70,), kv_heads=2, q_per_kv=4)
    q, k, v, do = case.inputs()
    whole = in_chunks(case, (q, k, v, do), 1)
    mine, kept = slice(start, stop), slice(start // 4, -(-stop // 4))
    _, options = case.call
    call = (case.segments, case.segments, HeadMap(start, 4), options)
    o = torch.zeros(70, stop - start, 64, device=DEVICE)
    lse = torch.full((stop - start, 70), -torch.inf, device=DEVICE)
    # head slices are strided views, as the ring passes them
    attention_forward(q[:, mine], k[:, kept], v[:, kept], o, lse, *call)
    torch.testing.assert_close(o, whole[0][:, mine])
    torch.testing.assert_close(lse, whole[4][mine])
    dq = torch.zeros_like(o)
    dkv = torch.zeros(70, 2, kept.stop - kept.start, 64, device=DEVICE)
    delta = (do[:, mine].float() * o).sum(-1).T.contiguous()
    attention_backward(
        q[:, mine], k[:, kept], v[:, kept], do[:, mine], lse, delta, dq, dkv[:, 0], dkv[:, 1],
        *call,
    )  # fmt: skip
    torch.testing.assert_close(dq, whole[1][:, mine], rtol=1e-3, atol=1e-3)
    if start % 4 == 0 and stop % 4 == 0:
        torch.testing.assert_close(dkv[:, 0], whole[2][:, kept], rtol=1e-3, atol=1e-3)


def test_head_intervals_add_up_to_the_gradients_of_all_heads() -> None:
    case = Case((70,), kv_heads=2, q_per_kv=4)
    q, k, v, do = case.inputs()
    o, _, dk, dv, lse = in_chunks(case, (q, k, v, do), 1)
    delta = (do.float() * o).sum(-1).T.contiguous()
    sums = torch.zeros(70, 2, 2, 64, device=DEVICE)
    for start, stop in [(0, 3), (3, 6), (6, 8)]:
        mine, kept = slice(start, stop), slice(start // 4, -(-stop // 4))
        attention_backward(
            q[:, mine], k[:, kept], v[:, kept], do[:, mine], lse[mine], delta[mine],
            torch.zeros(70, stop - start, 64, device=DEVICE), sums[:, 0, kept], sums[:, 1, kept],
            case.segments, case.segments, HeadMap(start, 4), case.call[1],
        )  # fmt: skip
    torch.testing.assert_close(sums[:, 0], dk, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sums[:, 1], dv, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [(0, 30), (40, 130)])
def test_queries_may_be_fewer_than_keys(rows: tuple[int, int]) -> None:
    """Some rows of the document only, as a rank of a ring holds them."""
    case = Case((130,))
    q, k, v, do = case.inputs()
    whole = in_chunks(case, (q, k, v, do), 1)
    mine, segments = slice(*rows), (Segment(0, *rows),)
    o = torch.zeros(rows[1] - rows[0], 2, 64, device=DEVICE)
    lse = torch.full((2, rows[1] - rows[0]), -torch.inf, device=DEVICE)
    attention_forward(q[mine], k, v, o, lse, segments, case.segments, *case.call)
    torch.testing.assert_close(o, whole[0][mine], **ALIKE)
    # and more queries than keys: rows above the first key see nothing
    o, lse = torch.zeros_like(whole[0]), torch.full((2, 130), -torch.inf, device=DEVICE)
    attention_forward(q, k[mine], v[mine], o, lse, case.segments, segments, *case.call)
    assert (o[: rows[0]] == 0).all()
    assert (lse[:, : rows[0]] == -torch.inf).all()
    assert lse[:, rows[0] :].isfinite().all()


@pytest.mark.parametrize(("dtype", "num_chunks"), [(FP16, None), (FP32, None), (FP16, 2)], ids=str)
def test_a_sink_takes_its_share(num_chunks: int | None, dtype: torch.dtype) -> None:
    # so many heads that the RMS error of their sinks' gradients is not one of chance
    case = Case((50,), q_per_kv=8, dtype=dtype, window=(30, -1), sink=True)
    assert_matches_dense(case, num_chunks)


def test_the_log_sum_exp_leaves_the_sink_out() -> None:
    case, sunk = (Case((70,), sink=sink) for sink in (False, True))
    q, k, v, _ = inputs = case.inputs()
    lse, with_sink = torch.full((2, 2, 70), torch.nan, device=DEVICE)
    call = (case.segments, case.segments, *case.call)
    for target, sink in ((lse, None), (with_sink, sunk.sinks)):
        out = torch.empty_like(q)
        attention_forward(q, k, v, None, target, *call, first=True, out=out, sink=sink)
    torch.testing.assert_close(lse, with_sink, rtol=1e-5, atol=2e-5)  # two kernels on the card
    assert not torch.equal(out, at_once(case, inputs)[0])


def test_a_sink_joins_at_the_last_launch_only() -> None:
    case = Case((4,), sink=True)
    q, k, v, _ = case.inputs()
    lse = torch.empty(2, 4, device=DEVICE)
    call = (case.segments, case.segments, *case.call)
    with pytest.raises(ValueError, match="sink is given without `out`"):
        attention_forward(q, k, v, q.float(), lse, *call, sink=case.sinks)
    with pytest.raises(ValueError, match=r"sink has shape \(1,\)"):
        attention_forward(q, k, v, None, lse, *call, first=True, out=q, sink=case.sinks[:1])


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


def test_rows_that_see_nothing_get_zeros_and_give_none() -> None:
    q, k = (torch.randn(n, 1, 64, device=DEVICE).half() for n in (70, 40))
    own, keys = (Segment(0, 0, 70),), (Segment(0, 20, 60),)
    call = (own, keys, HeadMap(0, 1), AttentionOptions(CAUSAL, 0.125))
    out = torch.full_like(q, torch.nan)
    lse = torch.full((1, 70), torch.nan, device=DEVICE)
    attention_forward(q, k, k, None, lse, *call, first=True, out=out)
    assert (out[:20] == 0).all()
    assert (lse[0, :20] == -torch.inf).all()
    assert out[20:].isfinite().all()
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, k))
    delta = (q.float() * out.float()).sum(-1).T.contiguous()
    attention_backward(q, k, k, q, lse, delta, dq, dk, dv, *call, accumulate=False)
    assert (dq[:20] == 0).all()
    assert all(x.isfinite().all() for x in (dq, dk, dv))


def test_keys_of_other_documents_only_leave_the_state_alone() -> None:
    q, k = (torch.randn(9, 1, 64, device=DEVICE).half() for _ in "qk")
    o, lse = torch.rand(9, 1, 64, device=DEVICE), torch.rand(1, 9, device=DEVICE)
    before = o.clone(), lse.clone()
    call = ((Segment(0, 0, 9),), (Segment(1, 0, 9),), HeadMap(0, 1), AttentionOptions(FULL, 0.1))
    attention_forward(q, k, k, o, lse, *call)
    assert torch.equal(o, before[0])
    assert torch.equal(lse, before[1])
    out = torch.full_like(q, torch.nan)
    attention_forward(q, k, k, o, lse, *call, out=out)
    torch.testing.assert_close(out, o.half())
    dk = torch.full_like(k, torch.nan)
    attention_backward(
        q, k, k, q, lse, lse, torch.empty_like(q), dk, torch.empty_like(k), *call, accumulate=False
    )
    assert (dk == 0).all()


def test_the_last_launch_may_write_the_output_dtype() -> None:
    case = Case((100,))
    q, k, v, _ = inputs = case.inputs()
    expected = in_chunks(case, inputs, 1)
    o = torch.full(q.shape, torch.nan, device=DEVICE)
    lse = torch.full((2, 100), torch.nan, device=DEVICE)
    out = torch.full_like(q, torch.nan)
    call = (case.segments, (Segment(0, 0, 60),), *case.call)
    attention_forward(q, k[:60], v[:60], o, lse, *call, first=True)
    call = (case.segments, (Segment(0, 60, 100),), *case.call)
    attention_forward(q, k[60:], v[60:], o, lse, *call, out=out)
    torch.testing.assert_close(out.float(), expected[0], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse, expected[4])


@pytest.mark.parametrize("lengths", [(129,), (70, 1, 30)], ids=str)
def test_runs_repeat_bitwise(lengths: tuple[int, ...]) -> None:
    case = Case(lengths if not ON_CARD else tuple(32 * n for n in lengths), q_per_kv=3)
    inputs = case.inputs()
    first = in_chunks(case, inputs, 2, deterministic=True)
    for _ in range(1 if not ON_CARD else 10):
        again = in_chunks(case, inputs, 2, deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("by", ["argument", "torch"])
def test_repeatable_results_come_from_the_split_form(
    by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backward, "_fused_on_hopper", Mock(side_effect=AssertionError("fused")))
    case = Case((70,))
    q, k, v, do = case.inputs()
    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    zeros = torch.zeros(q.shape[1], q.shape[0], device=DEVICE)
    call: tuple[Any, ...] = (q, k, v, do, zeros, zeros, *grads, case.segments, case.segments)
    torch.use_deterministic_algorithms(by == "torch")
    try:
        attention_backward(*call, *case.call, accumulate=False, deterministic=by == "argument")
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(x.isfinite().all() for x in grads)


@pytest.mark.parametrize("portable", [False, True] if ON_CARD else [True])
@pytest.mark.parametrize("head_dim", [64, 128, 256] if ON_CARD else [64])
def test_free_multiprocessors_change_nothing(
    head_dim: int, portable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many that each program walks several tiles."""
    if portable:
        monkeypatch.setattr(guard, "runs", lambda *_: False)
    case = Case((300,) if ON_CARD else (130,), head_dim=head_dim, kv_heads=2)
    q, k, v, do = inputs = case.inputs()
    out, dq, dk, dv, lse = at_once(case, inputs)
    call = (case.segments, case.segments, *case.call)
    again = [torch.full_like(x, torch.nan) for x in (out, dq, dk, dv)]
    lse_again = torch.full_like(lse, torch.nan)
    attention_forward(q, k, v, None, lse_again, *call, first=True, out=again[0], sm_margin=130)
    delta = (do.float() * out.float()).sum(-1).T.contiguous()
    attention_backward(q, k, v, do, lse, delta, *again[1:], *call, accumulate=False, sm_margin=130)
    torch.testing.assert_close([lse_again, *again], [lse, out, dq, dk, dv], **ALIKE)


def test_no_queries_and_no_keys_are_fine() -> None:
    call = (HeadMap(0, 1), AttentionOptions(CAUSAL, 0.1))
    q, k = (torch.randn(n, 1, 64, device=DEVICE).half() for n in (5, 0))
    out = torch.full_like(q, torch.nan)
    lse = torch.full((1, 5), torch.nan, device=DEVICE)
    attention_forward(q, k, k, None, lse, (Segment(0, 0, 5),), (), *call, first=True, out=out)
    assert (out == 0).all()
    attention_forward(k, q, q, None, lse[:, :0], (), (Segment(0, 0, 5),), *call, first=True, out=k)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(4, 2, 64, dtype=FP32)}, "k is torch.float16"),
        ({"q": torch.zeros(4, 2, 12, dtype=FP16)}, "head dimension 12"),
        ({"q": torch.zeros(4, 2, 264, dtype=FP16)}, "head dimension 264"),
        ({"q": torch.zeros(4, 2, 64, dtype=torch.int8)}, "q is torch.int8"),
        ({"k": torch.zeros(4, 3, 64, dtype=FP16)}, r"k has shape \(4, 3, 64\)"),
        ({"v": torch.zeros(4, 1, 128, dtype=FP16)[..., ::2]}, "v has last stride 2"),
        ({"o": torch.zeros(4, 2, 64, dtype=FP16)}, "o is torch.float16"),
        ({"o": None}, "o is None"),
        ({"lse": torch.zeros(4, 2)}, "lse has shape"),
    ],
    ids=str,
)
def test_unsupported_inputs_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "q": torch.zeros(4, 2, 64, dtype=FP16),
        "k": torch.zeros(4, 1, 64, dtype=FP16),
        "v": torch.zeros(4, 1, 64, dtype=FP16),
        "o": torch.zeros(4, 2, 64),
        "lse": torch.zeros(2, 4),
    } | change
    segments = (Segment(0, 0, 4),)
    arguments = {k: v if v is None else v.to(DEVICE) for k, v in arguments.items()}
    if "v" in change:
        arguments["v"] = change["v"].to(DEVICE).repeat_interleave(2, -1)[..., ::2]
    with pytest.raises(ValueError, match=message):
        attention_forward(
            *arguments.values(), segments, segments, HeadMap(0, 2), AttentionOptions(CAUSAL, 0.1)
        )


def test_a_negative_scale_is_named() -> None:
    q = torch.zeros(4, 1, 64, dtype=FP16, device=DEVICE)
    lse = torch.zeros(1, 4, device=DEVICE)
    segments = (Segment(0, 0, 4),)
    options = AttentionOptions(CAUSAL, -1.0)
    with pytest.raises(ValueError, match="softmax_scale is -1"):
        attention_forward(q, q, q, q.float(), lse, segments, segments, HeadMap(0, 1), options)


@pytest.mark.parametrize("softcap", [30.0, 1000.0, MAX_SOFTCAP])
def test_a_large_softcap_costs_float32_no_accuracy(softcap: float) -> None:
    assert_matches_dense(Case((90, 30), dtype=FP32, softcap=softcap, scale=1.0))


def test_a_softcap_beyond_the_precision_of_tanh_is_named() -> None:
    assert_matches_dense(Case((70,), softcap=MAX_SOFTCAP))
    case = Case((70,), softcap=1e6)
    with pytest.raises(ValueError, match=r"softcap is 1000000\.0; supported: up to 10000"):
        at_once(case, case.inputs())


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


def test_every_card_has_entries_for_every_kernel() -> None:
    assert launch_tables.FORWARD.keys() == launch_tables.GRAD_KV.keys()
    assert launch_tables.FORWARD.keys() == launch_tables.GRAD_Q.keys()
