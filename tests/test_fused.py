"""The fused backward against dense attention: in the interpreter, and on the card with `-m gpu`."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from kernel_runs import DEVICE, ON_CARD, Case, assert_matches_dense, in_chunks

from hexiseq_triton.kernels import HeadMap, backward, backward_fused, launch_tables
from hexiseq_triton.kernels.backward import attention_backward

pytestmark = [
    # the interpreter turns one-element arrays into scalars, and takes exp and log of empty rows
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    *([pytest.mark.gpu] if ON_CARD else []),
]

CASES = [
    Case((1,)),
    Case((129,), q_per_kv=3),
    Case((40, 0, 1, 25), kv_heads=2),
    Case((70,), head_dim=72, dtype=torch.float32),
    Case((70, 30), head_dim=128, dtype=torch.bfloat16, q_per_kv=1),
    Case((90,), causal=False, window=(17, 9)),
    Case((60,), softcap=2.0),
    *([Case((5000, 3, 700), head_dim=128, kv_heads=2)] if ON_CARD else []),
]


@pytest.fixture(autouse=True)
def _fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward, "prefers_fused", lambda q: True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_writes_gradients_in_the_input_dtype(case: Case) -> None:
    assert_matches_dense(case)


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_adds_the_parts_of_chunks(num_chunks: int) -> None:
    assert_matches_dense(Case((90, 20), kv_heads=2), num_chunks)


def test_head_intervals_add_up_to_the_gradients_of_all_heads() -> None:
    case = Case((70,), kv_heads=2, q_per_kv=4)
    q, k, v, do = case.inputs()
    o, dq, dk, dv, lse = in_chunks(case, (q, k, v, do), 1)
    delta = (do.float() * o).sum(-1).T.contiguous()
    dq_sum, dk_sum, dv_sum = (torch.zeros(x.shape, device=DEVICE) for x in (q, k, v))
    for start, stop in [(0, 3), (3, 6), (6, 8)]:
        mine, kept = slice(start, stop), slice(start // 4, -(-stop // 4))
        attention_backward(
            q[:, mine], k[:, kept], v[:, kept], do[:, mine], lse[mine], delta[mine],
            dq_sum[:, mine], dk_sum[:, kept], dv_sum[:, kept],
            case.segments, case.segments, HeadMap(start, 4), case.call[1],
        )  # fmt: skip
    torch.testing.assert_close([dq_sum, dk_sum, dv_sum], [dq, dk, dv], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("by", ["argument", "torch"])
def test_repeatable_results_come_from_the_split_form(
    by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backward, "grad_fused", Mock(side_effect=AssertionError("fused")))
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


def test_a_card_without_measurements_takes_the_split_form(monkeypatch: pytest.MonkeyPatch) -> None:
    q = Mock(shape=(64, 2, 64), device=Mock(type="cuda"))
    monkeypatch.setattr(launch_tables, "FUSED_TOKENS", {("sm_90", 64): 4096})
    monkeypatch.setattr(launch_tables, "tuned", lambda device: Mock(fused_tokens={}))
    for architecture, expected in (("sm_80", False), ("sm_90", True)):
        monkeypatch.setattr(launch_tables, "architecture", lambda device, name=architecture: name)
        assert backward_fused.prefers_fused(q) is expected
    q.shape = (5000, 2, 64)
    assert not backward_fused.prefers_fused(q)


def test_every_card_has_an_entry() -> None:
    assert launch_tables.GRAD_FUSED.keys() == {
        key for key in launch_tables.GRAD_KV if key[1] <= backward_fused.MAX_HEAD_DIM
    }
