"""What flash-attention 2's calls refuse, by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hexiseq_triton as hx
from hexiseq_triton.kernels.attention import refusal


def changed(**arguments: Any) -> dict[str, Any]:
    """Return the arguments of a call of 2 documents, 7 queries and 9 keys, with some changed."""
    q, k, v = (torch.zeros(7, 4, 8), torch.zeros(9, 2, 8), torch.zeros(9, 2, 8))
    call = {"q": q, "k": k, "v": v, "max_seqlen_q": 4, "max_seqlen_k": 5}
    call |= {"cu_seqlens_q": torch.tensor([0, 3, 7]), "cu_seqlens_k": torch.tensor([0, 4, 9])}
    return call | arguments


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"dropout_p": 0.1}, r"dropout_p is 0\.1; .*not supported"),
    ({"alibi_slopes": torch.ones(4)}, "alibi_slopes is given; ALiBi is not supported"),
    ({"block_table": torch.zeros(2, 1)}, "block_table is given; .*not supported"),
    ({"window_size": (-2, 0)}, r"window_size is \(-2, 0\)"),
    ({"softcap": -1.0}, r"softcap is -1\.0; it must be positive"),
    ({"softcap": float("nan")}, "softcap is nan; it must be positive"),
    ({"softcap": 1e6}, r"softcap is 1000000\.0; it must be positive, at most 10000"),
    ({"softmax_scale": 0.0}, r"softmax_scale is 0\.0; it must be positive"),
    ({"softmax_scale": float("inf")}, "softmax_scale is inf; it must be positive and finite"),
    ({"softmax_scale": torch.ones((), requires_grad=True)}, "softmax_scale requires grad; it is a"),
    ({"softcap": torch.ones((), requires_grad=True)}, "softcap requires grad; it is a number"),
    ({"q": torch.zeros(1, 7, 4, 8)}, r"q has shape \(1, 7, 4, 8\); expected \[T, heads, head_dim"),
    ({"q": torch.zeros(7, 3, 8)}, "q has 3 heads, k 2"),
    ({"q": torch.zeros(7, 4, 16)}, "k has head dimension 8, q 16"),
    ({"q": torch.zeros(7, 4, 8).half()}, r"k is torch\.float32, q torch\.float16"),
    ({"q": torch.zeros(7, 4, 8).int()}, r"q is torch\.int32"),
    ({"k": torch.zeros(9, 2, 8, device="meta")}, "k is on meta, q on cpu"),
    ({"v": torch.zeros(8, 2, 8)}, r"v has shape \(8, 2, 8\), k \(9, 2, 8\)"),
    ({"v": torch.zeros(9, 2, 16)}, "v has head dimension 16, k 8; values may be as wide as keys"),
    ({"v": torch.zeros(9, 2, 0)}, "v has head dimension 0, k 8"),
    ({"cu_seqlens_q": torch.tensor([0.0, 7.0])}, r"cu_seqlens_q is torch\.float32; use torch\.int"),
    ({"cu_seqlens_k": torch.tensor([[0, 9]])}, r"cu_seqlens_k has shape \(1, 2\); expected \[num"),
    ({"cu_seqlens_k": torch.tensor([0, 4, 8])}, "cu_seqlens_k goes from 0 to 8; k has 9 tokens"),
    ({"cu_seqlens_q": torch.tensor([1, 3, 7])}, "cu_seqlens_q goes from 1 to 7; q has 7 tokens"),
    ({"cu_seqlens_q": torch.tensor([0, 9, 7])}, "cu_seqlens_q falls from 9 to 7 at entry 2"),
    ({"cu_seqlens_q": torch.tensor([0, 7]), "max_seqlen_q": 7}, "cu_seqlens_q has 2 entries"),
    ({"learnable_sink": torch.ones(3)}, r"learnable_sink has shape \(3,\) .*, \[4\]"),
    ({"learnable_sink": torch.ones(4).int()}, r"learnable_sink .* is torch\.int32"),
    ({"learnable_sink": torch.ones(4, device="meta")}, "learnable_sink is on meta, q on cpu"),
    ({"cu_seqlens_q": torch.empty(3, device="meta").long()}, "cu_seqlens_q is on meta, q on cpu"),
    ({"cu_seqlens_k": [0, 4, 9]}, "cu_seqlens_k is a list; pass a tensor"),
    ({"k": None}, "k is a NoneType; pass a tensor"),
    ({"learnable_sink": [0.0] * 4}, "learnable_sink is a list; pass a tensor"),
    ({"causal": "false"}, "causal is 'false'; it is True or False"),
    ({"window_size": 5}, r"window_size is 5; it is \(left, right\)"),
    ({"window_size": (1, 2, 3)}, r"window_size is \(1, 2, 3\); it is \(left, right\)"),
    ({"window_size": (4.0, 0)}, r"window_size is \(4\.0, 0\); its sides are whole numbers"),
    ({"max_seqlen_k": 10.0}, r"max_seqlen_k is 10\.0; it is a whole number or None"),
    ({"max_seqlen_q": 3}, "max_seqlen_q is 3; the longest document .* has 4 tokens: use 4 or more"),
    ({"max_seqlen_k": 4}, "max_seqlen_k is 4; the longest document .* has 5 tokens: use 5 or more"),
]


@pytest.mark.parametrize(("arguments", "message"), ERRORS, ids=[text for _, text in ERRORS])
def test_what_does_not_fit_raises_by_name(arguments: dict[str, Any], message: str) -> None:
    hx.flash_attn_varlen_func(**changed())
    with pytest.raises(hx.HexiSeqError, match=message):
        hx.flash_attn_varlen_func(**changed(**arguments))


def test_dense_calls_raise_by_name_too() -> None:
    q, k = torch.zeros(2, 3, 4, 8), torch.zeros(2, 5, 2, 8)
    with pytest.raises(hx.InputError, match="dropout_p"):
        hx.flash_attn_func(q, k, k, 0.5)
    with pytest.raises(hx.InputError, match="alibi_slopes"):
        hx.flash_attn_func(q, k, k, alibi_slopes=torch.ones(4))
    with pytest.raises(hx.InputError, match=r"q has shape .*expected \[batch, seq"):
        hx.flash_attn_func(q[0], k[0], k[0])
    with pytest.raises(hx.InputError, match="q has head dimension 0"):
        hx.flash_attn_func(q[..., :0], k[..., :0], k[..., :0])
    with pytest.raises(hx.InputError, match="k has batch size 1, q 2"):
        hx.flash_attn_func(q, k[:1], k[:1])


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "message"),
    [
        ("cpu", torch.float16, 20, None),
        ("cuda", torch.float64, 20, None),  # the definition takes them
        ("cuda", torch.float16, 256, None),
        ("cuda", torch.float16, 20, "q has head dimension 20; supported: multiples of 8 up to 256"),
        ("cuda", torch.float32, 264, "q has head dimension 264; supported: multiples of 8"),
        ("cuda", torch.float8_e4m3fn, 64, "q is torch.float8_e4m3fn; the kernels take"),
        ("xpu", torch.float16, 64, "q is on xpu; supported: cpu and cuda"),
    ],
)
def test_what_no_implementation_takes_is_known_before_a_launch(
    device: str, dtype: torch.dtype, head_dim: int, message: str | None
) -> None:
    found = refusal(torch.device(device), dtype, head_dim)
    assert (found or "").startswith(message or "")
    assert (found is None) == (message is None)


def test_what_no_implementation_takes_is_an_input_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a card whose kernels do not take the head dimension."""
    monkeypatch.setattr("hexiseq_triton.flash.refusal", lambda *_: "q has head dimension 8")
    with pytest.raises(hx.InputError, match="q has head dimension 8"):
        hx.flash_attn_varlen_func(**changed())
    q, k = torch.zeros(2, 3, 4, 8), torch.zeros(2, 5, 2, 8)
    with pytest.raises(hx.InputError, match="q has head dimension 8"):
        hx.flash_attn_func(q, k, k)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("head_dim", [20, 264])
def test_a_head_dimension_that_the_kernels_lack_is_an_input_error(head_dim: int) -> None:
    q = torch.zeros(2, 3, 4, head_dim, device="cuda", dtype=torch.float16)
    with pytest.raises(hx.InputError, match=f"q has head dimension {head_dim}; supported"):
        hx.flash_attn_func(q, q, q)


def test_shapes_on_meta_need_no_implementation() -> None:
    q, k = torch.zeros(2, 3, 4, 8, device="meta"), torch.zeros(2, 5, 2, 8, device="meta")
    assert hx.flash_attn_func(q, k, k).shape == q.shape


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_forward_mode_differentiation_is_refused() -> None:
    q, k = torch.randn(2, 3, 4, 8), torch.randn(2, 5, 2, 8)
    for function, x in (
        (lambda q: hx.flash_attn_func(q, k, k), q),
        (lambda v: hx.flash_attn_func(q, k, v), k),
        (lambda sink: hx.flash_attn_func(q, k, k, learnable_sink=sink), torch.zeros(4)),
    ):
        with pytest.raises(hx.InputError, match="forward-mode differentiation is not supported"):
            torch.func.jvp(function, (x,), (x,))
