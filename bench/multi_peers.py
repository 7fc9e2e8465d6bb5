"""What one would run instead on several GPUs, on the same shapes as `multi_layouts`.

    ulysses-fa4, ulysses-cudnn    plain all-to-alls around FlashAttention-4 or cuDNN
    ring-fa4, ring-fa2            ring-flash-attention's zigzag on these kernels
    torch-cp-cudnn                PyTorch's context_parallel; its ring takes no grouped KV heads, so
                                  all query heads have one of their own, as its users would do

Each takes a `Shape` of one document and returns forward and backward, or raises `Unsupported`; the
stack that it gets too is closed after the timing.
ring-flash-attention needs a module flash_attn.flash_attn_interface; the environment names the
folder that holds one made of FlashAttention-4 or of PyTorch's own FlashAttention-2.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from multi_layouts import Shape, leaves, training
from torch.nn.attention import SDPBackend, sdpa_kernel


class Unsupported(Exception):
    """This peer is not installed, or cannot do the shape."""


def swapped(x: torch.Tensor, *, to_heads: bool) -> torch.Tensor:
    """Trade tokens for heads, or back, by all_to_all_single and a copy before or after."""
    world = dist.get_world_size()
    tokens, heads, head_dim = x.shape
    if to_heads:
        sent = x.view(tokens, world, heads // world, head_dim).transpose(0, 1).contiguous()
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent)
        return got.view(world * tokens, heads // world, head_dim)
    got = torch.empty_like(x)
    dist.all_to_all_single(got, x.contiguous())
    blocks = got.view(world, tokens // world, heads, head_dim)
    return blocks.transpose(0, 1).reshape(tokens // world, world * heads, head_dim)


class Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, to_heads: bool) -> torch.Tensor:
        ctx.to_heads = to_heads
        return swapped(x, to_heads=to_heads)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return swapped(grads[0], to_heads=not ctx.to_heads), None


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        o = F.scaled_dot_product_attention(
            *(x[None].transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
        )
    return o.transpose(1, 2)[0]


def _fa4() -> Callable[..., torch.Tensor]:
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError as error:
        raise Unsupported(f"FlashAttention-4: {error}") from error

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        o = flash_attn_func(q[None], k[None], v[None], causal=True)
        return (o[0] if isinstance(o, tuple) else o)[0]

    return attend


def _own_leaves(shape: Shape) -> list[torch.Tensor]:
    tokens = shape.tokens // dist.get_world_size()
    return leaves(tokens, shape.q_heads, shape.kv_heads, shape.head_dim)


def _ulysses(shape: Shape, attend: Callable[..., torch.Tensor]) -> Callable[[], object]:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        o = attend(*(Swap.apply(x, True) for x in (q, k, v)))  # type: ignore[no-untyped-call]
        out: torch.Tensor = Swap.apply(o, False)  # type: ignore[no-untyped-call]
        return out

    return training(call, *_own_leaves(shape))


def ulysses_fa4(shape: Shape, _: ExitStack) -> Callable[[], object]:
    return _ulysses(shape, _fa4())


def ulysses_cudnn(shape: Shape, _: ExitStack) -> Callable[[], object]:
    return _ulysses(shape, _cudnn)


def _ring(shape: Shape, adapter: str) -> Callable[[], object]:
    """Load ring-flash-attention anew, on one adapter's kernels."""
    folder = os.environ.get(adapter)
    if folder is None:
        raise Unsupported(f"{adapter} names no folder")
    for name in list(sys.modules):
        if name.startswith("ring_flash_attn") or name == "flash_attn.flash_attn_interface":
            del sys.modules[name]
    # its Hugging Face adapter does not import with transformers 5
    stub = types.ModuleType("ring_flash_attn.adapters")
    stub.substitute_hf_flash_attn = stub.update_ring_flash_attn_params = None  # type: ignore[attr-defined]
    sys.modules["ring_flash_attn.adapters"] = stub
    sys.path.insert(0, folder)
    try:
        from ring_flash_attn import zigzag_ring_flash_attn_func
    except ImportError as error:
        raise Unsupported(f"ring-flash-attention: {error}") from error
    finally:
        sys.path.remove(folder)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = zigzag_ring_flash_attn_func(q[None], k[None], v[None], causal=True)
        return out[0]

    return training(call, *_own_leaves(shape))


def ring_fa4(shape: Shape, _: ExitStack) -> Callable[[], object]:
    return _ring(shape, "RING_ON_FA4")


def ring_fa2(shape: Shape, _: ExitStack) -> Callable[[], object]:
    return _ring(shape, "RING_ON_FA2")


def torch_cp_cudnn(shape: Shape, stack: ExitStack) -> Callable[[], object]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("cp",))
    size = (1, shape.q_heads, shape.tokens, shape.head_dim)
    whole = [torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    stack.enter_context(
        context_parallel(
            mesh, buffers=whole, buffer_seq_dims=[2, 2, 2], no_restore_buffers=set(whole)
        )
    )
    stack.enter_context(sdpa_kernel(SDPBackend.CUDNN_ATTENTION))
    q, k, v = (x.detach().clone().requires_grad_() for x in whole)  # now this rank's part

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return training(attend, q, k, v, torch.randn_like(q))


Peer = Callable[[Shape, ExitStack], Callable[[], object]]

PEERS: dict[str, Peer] = {
    "ulysses-fa4": ulysses_fa4,
    "ulysses-cudnn": ulysses_cudnn,
    "torch-cp-cudnn": torch_cp_cudnn,
    "ring-fa4": ring_fa4,
    "ring-fa2": ring_fa2,
}
