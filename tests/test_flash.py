"""flash-attention 2's calls against dense attention aligned at the bottom right."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from aligned import NEEDS_GPU, NOTHING_SEEN, aligned_attention, packed, varlen
from assertions import assert_as_close_as

import hexiseq_triton as hx
from hexiseq_triton.segments import FULL, Mask

CASES: list[tuple[list[int], list[int], int, int, dict[str, Any]]] = [
    ([1], [1], 1, 1, {"causal": True}),
    ([63, 1], [63, 1], 3, 2, {"causal": True}),
    ([127, 128, 129], [127, 128, 129], 1, 2, {"causal": True}),
    ([257], [257], 3, 1, {"causal": False}),
    ([0, 7, 0, 0, 61, 0], [0, 7, 0, 0, 61, 0], 7, 1, {"causal": True}),
    ([0, 7, 5, 0], [9, 0, 5, 3], 1, 1, {"causal": True}),
    ([1, 63, 2], [257, 129, 128], 8, 1, {"causal": True}),
    ([128, 129, 33], [1, 127, 0], 3, 1, {"causal": True}),
    ([40, 13], [13, 40], 1, 1, {"causal": False}),
    ([40, 13, 20], [13, 40, 20], 3, 1, {"window_size": (5, 3)}),
    ([40, 13, 20], [13, 40, 20], 1, 2, {"window_size": (0, 0)}),
    ([9, 40], [40, 9], 1, 1, {"window_size": (-1, 2)}),
    ([9, 40], [40, 9], 1, 1, {"window_size": (4, -1)}),
    ([63, 30], [31, 129], 7, 1, {"causal": True, "window_size": (16, 16)}),
    ([50, 20], [50, 31], 2, 1, {"causal": True, "softcap": 0.8}),
    ([50, 20], [50, 31], 1, 1, {"window_size": (6, 2), "softcap": 2.0, "softmax_scale": 0.9}),
]


@pytest.mark.parametrize(("q_lengths", "k_lengths", "per_kv", "kv_heads", "options"), CASES)
def test_output_lse_and_gradients_equal_dense_attention(
    q_lengths: list[int], k_lengths: list[int], per_kv: int, kv_heads: int, options: dict[str, Any]
) -> None:
    qkv = packed(q_lengths, k_lengths, per_kv, kv_heads)

    out, lse, probabilities = varlen(qkv, q_lengths, k_lengths, return_attn_probs=True, **options)

    out_ref, lse_ref = aligned_attention(*qkv, q_lengths, k_lengths, **options)
    assert probabilities is None
    do = torch.randn_like(out)
    grads = torch.autograd.grad(out, qkv, do)
    grads_ref = torch.autograd.grad(out_ref, qkv, do)
    found, expected = (out, lse, *grads), (out_ref, lse_ref, *grads_ref)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    unseen = lse == NOTHING_SEEN
    assert (out.transpose(0, 1)[unseen] == 0).all()
    assert (grads[0].transpose(0, 1)[unseen] == 0).all()


@pytest.mark.parametrize("width", [1, 5, 7])
def test_values_narrower_than_keys_equal_dense_attention(width: int) -> None:
    lengths = ([40, 0, 20], [13, 5, 31])
    options: dict[str, Any] = {"causal": True, "softcap": 2.0}
    q, k, v = packed(*lengths, per_kv=3, kv_heads=2)
    v = v.detach()[..., :width].requires_grad_()
    sink = torch.linspace(-1.0, 1.0, 6).double().requires_grad_()
    inputs = (q, k, v, sink)
    out, lse, _ = varlen(
        (q, k, v), *lengths, return_attn_probs=True, learnable_sink=sink, **options
    )
    expected = aligned_attention(q, k, v, *lengths, learnable_sink=sink, **options)
    assert out.shape == (60, 6, width)
    assert out.is_contiguous()
    do = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, do)
    grads_ref = torch.autograd.grad(expected[0], inputs, do)
    for a, b in zip((out, lse, *grads), (*expected, *grads_ref), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)

    q, k, v = (x.detach()[:9].view(1, 9, -1, x.shape[-1]) for x in (q, k, v))
    found = hx.flash_attn_func(q, k, v, causal=True)
    whole, _ = aligned_attention(q[0], k[0], v[0], [9], [9], causal=True)
    torch.testing.assert_close(found, whole[None], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_sink_and_its_gradient_equal_dense_attention(dtype: torch.dtype) -> None:
    """With the gradient of lse too, and queries that see nothing."""
    lengths, options = ([20, 9, 30], [11, 30, 0]), {"causal": True, "softcap": 2.0}
    qkv = packed(*lengths, per_kv=3, kv_heads=2)
    sink = torch.linspace(-2.0, 3.0, 6).to(dtype).requires_grad_()
    out, lse, _ = varlen(qkv, *lengths, return_attn_probs=True, learnable_sink=sink, **options)
    expected = aligned_attention(*qkv, *lengths, learnable_sink=sink.double(), **options)
    do, dlse = torch.randn_like(out), torch.randn_like(lse)
    seen = lse > NOTHING_SEEN
    grads = []
    for o, log in ((out, lse), expected):
        torch.testing.assert_close(o, expected[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(log, expected[1], rtol=0, atol=1e-12)
        loss = (o * do).sum() + (log * dlse)[seen].sum()
        grads.append(torch.autograd.grad(loss, [*qkv, sink]))
    for a, b in zip(*grads, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("num_q", "num_k", "mask"),
    [(2, 5, ["11110", "11111"]), (5, 2, ["00", "00", "00", "10", "11"])],
)
def test_causal_is_aligned_at_the_bottom_right(num_q: int, num_k: int, mask: list[str]) -> None:
    """flash-attention's own two examples, read off through one-hot values."""
    q, k = torch.zeros(num_q, 1, 8), torch.zeros(num_k, 1, 8)
    v = torch.eye(8)[:num_k, None]
    out = varlen((q, k, v), [num_q], [num_k], causal=True)
    seen = ["".join(str(int(p > 0)) for p in row[:num_k]) for row in out[:, 0]]
    assert seen == mask


@pytest.mark.parametrize(("causal", "right"), [(False, -1), (True, -1), (False, 0)])
def test_windows_beyond_every_token_are_no_windows(causal: bool, right: int) -> None:
    q_lengths, k_lengths = [9, 33], [30, 12]
    qkv = packed(q_lengths, k_lengths)
    expected = varlen(qkv, q_lengths, k_lengths, causal=causal or right == 0)
    far = (None, 10**6, 2**40, sys.maxsize, 2**70)
    for left in (-1, *far):
        for side in (0,) if right == 0 else (-1, *far):
            out = varlen(qkv, q_lengths, k_lengths, causal=causal, window_size=(left, side))
            assert torch.equal(out, expected)


def test_a_far_side_leaves_the_other_one_alone() -> None:
    qkv = packed([9, 33], [30, 12])
    for near, far in (((4, -1), (4, sys.maxsize)), ((-1, 4), (sys.maxsize, 4))):
        expected = varlen(qkv, [9, 33], [30, 12], window_size=near)
        assert torch.equal(varlen(qkv, [9, 33], [30, 12], window_size=far), expected)
    assert Mask.from_flash(False, (sys.maxsize, sys.maxsize)) == FULL  # of tile maps, in int64


def test_lse_of_packed_documents_is_float32_of_heads_and_tokens() -> None:
    qkv = packed([5, 3], [4, 6], per_kv=3, kv_heads=2, dtype=torch.float32)
    out, lse, _ = varlen(qkv, [5, 3], [4, 6], return_attn_probs=True)
    assert out.dtype == lse.dtype == torch.float32
    assert lse.shape == (6, 8)
    assert lse.is_contiguous()


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[NEEDS_GPU, pytest.mark.gpu])]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("q_lengths", "k_lengths", "per_kv", "kv_heads", "options"), CASES[-4:])
def test_low_precision_is_as_close_as_plain_torch(
    q_lengths: list[int],
    k_lengths: list[int],
    per_kv: int,
    kv_heads: int,
    options: dict[str, Any],
    dtype: torch.dtype,
    device: str,
) -> None:
    qkv = packed(q_lengths, k_lengths, per_kv, kv_heads, head_dim=16, dtype=dtype)
    do = torch.randn_like(qkv[0])

    leaves = [x.detach().to(device).requires_grad_() for x in qkv]
    out, lse, _ = varlen(leaves, q_lengths, k_lengths, return_attn_probs=True, **options)

    assert lse.dtype == torch.float32
    found = [out, *torch.autograd.grad(out, leaves, do.to(device))]
    exact, plain = (
        dense_results(
            [x.detach().to(kind) for x in qkv], do.to(kind), q_lengths, k_lengths, options
        )
        for kind in (torch.float64, dtype)
    )
    for a, b, c in zip(found, exact, plain, strict=True):
        assert a.dtype == dtype
        assert_as_close_as(a.detach().cpu(), b.detach(), c.detach())


def dense_results(
    qkv: list[torch.Tensor],
    do: torch.Tensor,
    q_lengths: list[int],
    k_lengths: list[int],
    options: dict[str, Any],
) -> list[torch.Tensor]:
    """Return out, dq, dk and dv of dense attention in the dtype of the inputs."""
    leaves = [x.requires_grad_() for x in qkv]
    out, _ = aligned_attention(*leaves, q_lengths, k_lengths, **options)
    return [out, *torch.autograd.grad(out, leaves, do)]


def test_lse_can_be_differentiated() -> None:
    q_lengths, k_lengths = [20, 9], [11, 30]
    qkv = packed(q_lengths, k_lengths, per_kv=2)
    options = {"causal": True, "softcap": 1.5}
    results = varlen(qkv, q_lengths, k_lengths, return_attn_probs=True, **options)[:2]
    expected = aligned_attention(*qkv, q_lengths, k_lengths, **options)
    do, dlse = torch.randn_like(results[0]), torch.randn_like(results[1])
    seen = expected[1] > NOTHING_SEEN

    for weights in ((do, dlse), (do * 0, dlse)):
        losses = [(o * weights[0]).sum() + (lse * weights[1])[seen].sum()
                  for o, lse in (results, expected)]  # fmt: skip
        grads = [torch.autograd.grad(loss, qkv, retain_graph=True) for loss in losses]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    only_lse = torch.autograd.grad(results[1], qkv, dlse)
    for a, b in zip(only_lse, grads[1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_lse_can_be_differentiated_beside_a_sink_of_any_size() -> None:
    q_lengths, k_lengths = [20, 9], [11, 30]
    qkv = packed(q_lengths, k_lengths, per_kv=3)
    sink = torch.tensor([-1000.0, 1.0, 1000.0], dtype=torch.float64, requires_grad=True)
    options = {"causal": True, "learnable_sink": sink}
    results = varlen(qkv, q_lengths, k_lengths, return_attn_probs=True, **options)[:2]
    expected = aligned_attention(*qkv, q_lengths, k_lengths, **options)
    do, dlse = torch.randn_like(results[0]), torch.randn_like(results[1])
    seen = expected[1] > NOTHING_SEEN

    losses = [(o * do).sum() + (lse * dlse)[seen].sum() for o, lse in (results, expected)]
    grads = [torch.autograd.grad(loss, [*qkv, sink]) for loss in losses]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_lse_of_a_row_without_keys_gives_no_gradient() -> None:
    """As when two parts are merged, of which neither has keys for it."""
    qkv = packed([20], [11])
    _, lse, _ = varlen(qkv, [20], [11], causal=True, return_attn_probs=True)
    merged = torch.logaddexp(lse, lse)
    (dlse,) = torch.autograd.grad(merged.exp().sum(), lse, retain_graph=True)
    assert dlse[:, :9].isnan().all()
    grads = torch.autograd.grad(merged.exp().sum(), qkv[:2], retain_graph=True)
    expected = torch.autograd.grad((lse[:, 9:] + math.log(2)).exp().sum(), qkv[:2])
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
