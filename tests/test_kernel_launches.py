"""Launches of the Triton kernels: which heads and rows they take, what they write, and repeatably.

Against the same attention launched whole; in the interpreter, and on the card with `-m gpu`.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from kernel_runs import ALIKE, DEVICE, MARKS, ON_CARD, Case, at_once, in_chunks

from hexiseq_triton.kernels import AttentionOptions, HeadMap, backward, launch_tables
from hexiseq_triton.kernels.backward import attention_backward
from hexiseq_triton.kernels.forward import attention_forward
from hexiseq_triton.kernels.hopper import guard
from hexiseq_triton.segments import CAUSAL, FULL, Segment

pytestmark = MARKS


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


def test_no_queries_and_no_keys_are_fine() -> None:
    call = (HeadMap(0, 1), AttentionOptions(CAUSAL, 0.1))
    q, k = (torch.randn(n, 1, 64, device=DEVICE).half() for n in (5, 0))
    out = torch.full_like(q, torch.nan)
    lse = torch.full((1, 5), torch.nan, device=DEVICE)
    attention_forward(q, k, k, None, lse, (Segment(0, 0, 5),), (), *call, first=True, out=out)
    assert (out == 0).all()
    attention_forward(k, q, q, None, lse[:, :0], (), (Segment(0, 0, 5),), *call, first=True, out=k)


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


def test_every_card_has_entries_for_every_kernel() -> None:
    assert launch_tables.FORWARD.keys() == launch_tables.GRAD_KV.keys()
    assert launch_tables.FORWARD.keys() == launch_tables.GRAD_Q.keys()
