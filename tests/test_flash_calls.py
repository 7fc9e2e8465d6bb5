"""How flash-attention 2's calls may be made: under which settings, on which tensors and lengths."""

from __future__ import annotations

import inspect

import pytest
import torch
from aligned import NEEDS_GPU, aligned_attention, cu_seqlens, packed, varlen

import hexiseq_triton as hx


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_rounds_nothing(dtype: torch.dtype) -> None:
    lengths = [20, 9]
    qkv = packed(lengths, lengths, per_kv=2, dtype=dtype)

    def results(*, autocast: bool) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = varlen(qkv, lengths, lengths, causal=True)
            return [out, *torch.autograd.grad(out, qkv, torch.ones_like(out))]

    for a, b in zip(results(autocast=True), results(autocast=False), strict=True):
        assert torch.equal(a, b)


def test_another_default_device_changes_nothing() -> None:
    q, k = torch.randn(2, 3, 4, 8), torch.randn(2, 5, 2, 8)
    expected = hx.flash_attn_func(q, k, k)
    with torch.device("meta"):
        assert torch.equal(hx.flash_attn_func(q, k, k), expected)


def test_views_of_one_projection_work_and_gradients_reach_it() -> None:
    torch.manual_seed(0)
    lengths = [13, 20]
    fused = torch.randn(33, 6 + 2 + 2, 8, dtype=torch.float64, requires_grad=True)
    out = varlen(fused.split([6, 2, 2], dim=1), lengths, lengths, causal=True)
    expected, _ = aligned_attention(*fused.split([6, 2, 2], dim=1), lengths, lengths, causal=True)
    torch.testing.assert_close(out, expected)
    (grad,) = torch.autograd.grad(out.sum(), fused)  # the gradient of out has strides 0
    (grad_ref,) = torch.autograd.grad(expected.sum(), fused)
    torch.testing.assert_close(grad, grad_ref)


def test_strides_of_the_head_dimension_do_not_matter() -> None:
    q, k, v = packed([12], [17])
    scattered = [x.detach().transpose(0, 2).contiguous().transpose(0, 2) for x in (q, k, v)]
    assert all(x.stride(-1) != 1 for x in scattered)
    assert torch.equal(varlen(scattered, [12], [17]), varlen((q, k, v), [12], [17]))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(1, 1), (5, 9), (9, 5), (0, 4), (4, 0)])
def test_dense_calls_equal_packed_calls(seq_q: int, seq_k: int, transposed: bool) -> None:
    torch.manual_seed(0)
    batch, options = 3, {"causal": True, "window_size": (6, -1), "softcap": 2.0}
    options["learnable_sink"] = torch.tensor([0.0, 1.0, -1.0, 2.0])
    shapes = ((seq_q, 4), (seq_k, 2), (seq_k, 2))
    if transposed:  # as Hugging Face lays it out
        dense = [torch.randn(batch, heads, seq, 8).transpose(1, 2) for seq, heads in shapes]
    else:
        dense = [torch.randn(batch, seq, heads, 8) for seq, heads in shapes]
    dense = [x.requires_grad_() for x in dense]
    rows = [x.detach().flatten(0, 1).requires_grad_() for x in dense]

    out, lse, _ = hx.flash_attn_func(*dense, return_attn_probs=True, **options)

    lengths = [seq_q] * batch, [seq_k] * batch
    out_ref, lse_ref, _ = varlen(rows, *lengths, return_attn_probs=True, **options)
    assert out.shape == dense[0].shape
    assert lse.shape == (batch, 4, seq_q)
    assert lse.dtype == torch.float32
    assert torch.equal(out.flatten(0, 1), out_ref)
    assert torch.equal(lse.transpose(0, 1).flatten(1), lse_ref)
    grads = torch.autograd.grad(out.square().sum(), dense)
    grads_ref = torch.autograd.grad(out_ref.square().sum(), rows)
    for a, b in zip(grads, grads_ref, strict=True):
        assert torch.equal(a.flatten(0, 1), b)


@pytest.mark.parametrize("num_documents", [0, 1, 3])
def test_no_tokens_at_all(num_documents: int) -> None:
    lengths = [0] * num_documents
    qkv = packed(lengths, lengths)
    out = varlen(qkv, lengths, lengths, causal=True)
    assert out.shape == (0, 1, 8)
    assert all(grad.shape == (0, 1, 8) for grad in torch.autograd.grad(out.sum(), qkv))


def test_documents_without_queries_give_their_keys_gradient_zero() -> None:
    qkv = packed([4, 0, 3], [4, 6, 3])
    _, dk, dv = torch.autograd.grad(varlen(qkv, [4, 0, 3], [4, 6, 3]).sum(), qkv)
    assert (dk[4:10] == 0).all()
    assert (dv[4:10] == 0).all()
    assert (dv[:4] != 0).all()


def test_max_seqlens_may_be_left_out_or_too_large() -> None:
    qkv = packed([4, 2], [3, 5])
    offsets = cu_seqlens([4, 2]), cu_seqlens([3, 5]).long()
    expected = varlen(qkv, [4, 2], [3, 5])
    for longest in ((None, None), (100, 5)):
        assert torch.equal(hx.flash_attn_varlen_func(*qkv, *offsets, *longest), expected)


@NEEDS_GPU
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_only_reading_cu_seqlens_waits_for_the_gpu() -> None:
    qkv = [x.detach().cuda().requires_grad_() for x in packed([9, 4], [9, 4], dtype=torch.float16)]
    dense = [x.detach()[None].requires_grad_() for x in qkv]
    offsets = cu_seqlens([9, 4])
    on_card = offsets.cuda()

    def both(offsets: torch.Tensor) -> torch.Tensor:
        out = hx.flash_attn_varlen_func(*qkv, offsets, offsets, 9, 9, causal=True)
        return out.sum() + hx.flash_attn_func(*dense, causal=True).sum()

    both(offsets).backward()  # compiles, which may wait
    read = both(on_card)
    torch.cuda.set_sync_debug_mode("error")
    try:
        read.backward()
        both(offsets).backward()
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            both(on_card)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_names_order_and_defaults_are_those_of_flash_attention_2() -> None:
    required = ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    optional = {
        "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1),
        "softcap": 0.0, "alibi_slopes": None, "deterministic": False, "return_attn_probs": False,
    }  # fmt: skip
    none = inspect.Parameter.empty
    ours = [("learnable_sink", None)]  # flash-attention 4's, by keyword only
    found = inspect.signature(hx.flash_attn_varlen_func).parameters.items()
    assert [(name, p.default) for name, p in found] == [
        *((name, none) for name in required), *optional.items(), ("block_table", None), *ours
    ]  # fmt: skip
    found = inspect.signature(hx.flash_attn_func).parameters.items()
    assert [(name, p.default) for name, p in found] == [
        *((name, none) for name in "qkv"), *optional.items(), *ours
    ]  # fmt: skip
