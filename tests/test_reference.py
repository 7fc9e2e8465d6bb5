"""The blockwise reference against dense attention, forward and gradients, in float64."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from dense import dense_attention

from hexiseq_triton.kernels import (
    AttentionOptions,
    HeadMap,
    attention_backward,
    attention_forward,
    reference,
)
from hexiseq_triton.kernels.options import placed
from hexiseq_triton.kernels.sink import lse_with_sink, sink_gradient
from hexiseq_triton.segments import CAUSAL, Mask, Segment, cut, whole_documents

CASES: list[tuple[list[int], int, int, dict[str, Any]]] = [
    ([1], 1, 1, {"causal": True}),
    ([129], 3, 1, {"causal": True}),
    ([0, 7, 0, 61, 1], 7, 1, {"causal": True}),
    ([31, 97], 2, 2, {"causal": False}),
    ([64, 63], 3, 2, {"causal": True, "window_size": (10, -1)}),
    ([50], 1, 3, {"causal": False, "window_size": (4, 9), "softcap": 1.5}),
    ([65], 3, 1, {"causal": True, "softcap": 3.0, "softmax_scale": 0.5}),
]


@pytest.mark.parametrize("block", [1024, 16])
@pytest.mark.parametrize("num_chunks", [1, 2, 5])
@pytest.mark.parametrize(("lengths", "per_kv", "kv_heads", "options"), CASES)
def test_chunks_in_any_order_equal_dense_attention(
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[int],
    per_kv: int,
    kv_heads: int,
    options: dict[str, Any],
    num_chunks: int,
    block: int,
) -> None:
    monkeypatch.setattr(reference, "BLOCK", block)
    torch.manual_seed(0)
    total, head_dim = sum(lengths), 8
    q, do = (torch.randn(total, per_kv * kv_heads, head_dim, dtype=torch.float64) for _ in "qd")
    k, v = (torch.randn(total, kv_heads, head_dim, dtype=torch.float64) for _ in "kv")

    found = in_chunks(q, k, v, do, lengths, num_chunks, per_kv, options)

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = dense_attention(*leaves, lengths, **options)
    expected = [o, *torch.autograd.grad(o, leaves, do)]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def in_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    lengths: list[int],
    num_chunks: int,
    per_kv: int,
    options: dict[str, Any],
) -> list[torch.Tensor]:
    """Return o, dq, dk, dv computed over chunks of keys in a shuffled order."""
    total = q.shape[0]
    mask = Mask.from_flash(options["causal"], options.get("window_size", (-1, -1)))
    scale = options.get("softmax_scale", q.shape[-1] ** -0.5)
    call = (HeadMap(0, per_kv), AttentionOptions(mask, scale, options.get("softcap", 0.0)))
    segments = whole_documents(lengths)
    edges = [total * i // num_chunks for i in range(num_chunks + 1)]
    runs = cut(segments, [b - a for a, b in pairwise(edges)])
    chunks = [(slice(*rows), run) for rows, run in zip(pairwise(edges), runs, strict=True)]
    random.Random(1).shuffle(chunks)

    o, lse = torch.zeros_like(q), q.new_full((q.shape[1], total), -torch.inf)
    for rows, run in chunks:
        attention_forward(q, k[rows], v[rows], o, lse, segments, run, *call)
    delta = (do * o).sum(-1).T
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, run in chunks:
        attention_backward(
            q, k[rows], v[rows], do, lse, delta, dq, dk[rows], dv[rows], segments, run, *call
        )
    return [o, dq, dk, dv]


def test_placed_chunks_equal_chunks_in_a_row() -> None:
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(30, 2, 8, dtype=torch.float64) for _ in "qkvd")
    segments = whole_documents([11, 19])
    call = (HeadMap(0, 1), AttentionOptions(CAUSAL, 0.4))
    first, second = cut(segments, [14, 16])
    pool = torch.full((2, 50, 2, 8), torch.nan, dtype=torch.float64)
    pool[:, 30:44], pool[:, 2:18] = (
        torch.stack([k[rows], v[rows]]) for rows in (slice(14), slice(14, 30))
    )
    both = (*placed(second, 2), *placed(first, 30))

    def run(keys: Any, kv_segments: Any) -> list[torch.Tensor]:
        o, lse = torch.empty_like(q), q.new_empty(2, 30)
        attention_forward(q, *keys, o, lse, segments, kv_segments, *call, first=True)
        dq, (dk, dv) = torch.zeros_like(q), torch.zeros_like(keys)
        delta = (do * o).sum(-1).T
        attention_backward(q, *keys, do, lse, delta, dq, dk, dv, segments, kv_segments, *call)
        return [o, lse, dq, dk, dv]

    *found, dk, dv = run(pool, both)
    *expected, dk_ref, dv_ref = run(torch.stack([k, v]), segments)
    found += [x[rows] for x in (dk, dv) for rows in (slice(30, 44), slice(2, 18))]
    expected += [x[rows] for x in (dk_ref, dv_ref) for rows in (slice(14), slice(14, 30))]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("logit", [-3.0, 0.7, 60.0, -torch.inf])
def test_a_sink_equals_a_key_without_value(logit: float) -> None:
    """Gradients too, and rows that see no key."""
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(9, 2, 8, dtype=torch.float64) for _ in "qkvd")
    sink = torch.tensor([logit, 0.2], dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, sink)]
    o = dense_attention(*leaves[:3], [9], causal=True, softmax_scale=0.4, sink=leaves[3])
    expected = [o.detach(), *torch.autograd.grad(o, leaves, do)]

    blind = torch.ones(2, 2, 8, dtype=torch.float64)  # two more queries, of a document without keys
    queries, grads = torch.cat([q, blind]), torch.cat([do, blind])
    segments = [Segment(0, 0, 9), Segment(1, 0, 2)]
    call = (segments, segments[:1], HeadMap(0, 1), AttentionOptions(CAUSAL, 0.4))
    out, lse = torch.empty_like(queries), queries.new_empty(2, 11)
    attention_forward(queries, k, v, None, lse, *call, first=True, out=out, sink=sink)
    assert (lse[:, 9:] == -torch.inf).all()
    lse = lse_with_sink(lse, sink)
    delta = (grads * out).sum(-1).T
    dq, dk, dv = torch.zeros_like(queries), torch.zeros_like(k), torch.zeros_like(v)
    attention_backward(queries, k, v, grads, lse, delta, dq, dk, dv, *call)
    found = [out[:9], dq[:9], dk, dv, sink_gradient(sink, lse, delta)]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert (out[9:] == 0).all()
    assert (dq[9:] == 0).all()


def test_rows_that_see_no_key_stay_zero_through_three_chunks() -> None:
    q = torch.randn(4, 2, 8)
    o, lse = torch.zeros_like(q), torch.full((2, 4), -torch.inf)
    options = AttentionOptions(CAUSAL, 1.0)
    own, other = [Segment(0, 0, 4)], [Segment(1, 0, 3)]
    k = torch.randn(3, 2, 8)
    for _ in range(3):
        attention_forward(q, k, k, o, lse, own, other, HeadMap(0, 1), options)
    assert (o == 0).all()
    assert (lse == -torch.inf).all()
    grads = [torch.zeros_like(x) for x in (q, k, k)]
    attention_backward(q, k, k, q, lse, lse * 0, *grads, own, other, HeadMap(0, 1), options)
    assert all((grad == 0).all() for grad in grads)


def test_rows_masked_inside_a_block_get_finite_gradients() -> None:
    """A row of a visited block that sees none of its keys, and no other key either."""
    q, k = torch.randn(6, 1, 4), torch.randn(3, 1, 4)
    o, lse = torch.zeros_like(q), torch.full((1, 6), -torch.inf)
    options = AttentionOptions(CAUSAL, 1.0)
    own, keys = [Segment(0, 0, 6)], [Segment(0, 4, 7)]  # rows 0..3 see nothing
    attention_forward(q, k, k, o, lse, own, keys, HeadMap(0, 1), options)
    assert (lse[0, :4] == -torch.inf).all()
    assert lse[0, 4:].isfinite().all()
    grads = [torch.zeros_like(x) for x in (q, k, k)]
    delta = (q * o).sum(-1).T
    attention_backward(q, k, k, q, lse, delta, *grads, own, keys, HeadMap(0, 1), options)
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[0][:4] == 0).all()
    assert (o[:4] == 0).all()


@pytest.mark.parametrize("interval", [(0, 3), (3, 6), (6, 8), (2, 7)])
def test_a_head_interval_equals_its_slice_of_all_heads(interval: tuple[int, int]) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(9, 8, 4), torch.randn(9, 2, 4), torch.randn(9, 2, 4)
    segments = [Segment(0, 0, 9)]
    start, stop = interval
    mine = slice(start // 4, -(-stop // 4))
    o, lse = torch.zeros(9, stop - start, 4), torch.full((stop - start, 9), -torch.inf)
    attention_forward(
        q[:, start:stop], k[:, mine], v[:, mine], o, lse, segments, segments,
        HeadMap(start, 4), AttentionOptions(CAUSAL, 0.5),
    )  # fmt: skip
    whole = dense_attention(q, k, v, [9], causal=True, softmax_scale=0.5)
    torch.testing.assert_close(o, whole[:, start:stop])


def test_low_precision_inputs_carry_float32_state() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(33, 2, 16) for _ in "qkv")
    o, lse = torch.zeros_like(q), torch.full((2, 33), -torch.inf)
    segments = [Segment(0, 0, 33)]
    low = [x.bfloat16() for x in (q, k, v)]
    attention_forward(
        *low, o, lse, segments, segments, HeadMap(0, 1), AttentionOptions(CAUSAL, 0.25)
    )
    exact = dense_attention(*(x.float() for x in low), [33], causal=True, softmax_scale=0.25)
    torch.testing.assert_close(o, exact, rtol=1e-5, atol=1e-5)
