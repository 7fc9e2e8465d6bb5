"""What one would run instead under transformers' hooks: Ulysses, and PyTorch's context_parallel.

Both attend with cuDNN. Each is a context manager that takes a packed batch and yields what the
model is called with, this rank's labels, and the tokens that have one on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from multi_peers import Swap
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface

from hexiseq_triton.integrations.hf import no_mask

Call = tuple[dict[str, Any], torch.Tensor, int]
Pack = tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, ...]]
"""ids, shifted labels and positions, each [T] on the GPU, and the documents' lengths."""


def register() -> None:
    """Make the names `ulysses` and `torch_cp` known to transformers."""
    for name, attention in (("bench_ulysses", _ulysses), ("bench_torch_cp", _torch_cp)):
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, no_mask)


def _ulysses(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None,
    lengths: tuple[int, ...] = (), **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Trade tokens for heads, attend each document for itself, and trade back."""
    q, k, v = (Swap.apply(x[0].transpose(0, 1), True) for x in (query, key, value))
    documents = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        parts = [
            F.scaled_dot_product_attention(
                *(x[None].transpose(1, 2) for x in document), is_causal=True, enable_gqa=True
            )[0].transpose(0, 1)
            for document in documents
        ]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return Swap.apply(out.contiguous(), False)[None], None


def _torch_cp(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, **_: Any
) -> tuple[torch.Tensor, None]:
    """Attend by the ring that `context_parallel` puts in; it takes no grouped KV heads."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return out.transpose(1, 2), None


@contextmanager
def ulysses(pack: Pack) -> Iterator[Call]:
    ids, labels, positions, lengths = pack
    here = slice(*(ids.numel() * (dist.get_rank() + i) // dist.get_world_size() for i in (0, 1)))
    inputs = {"input_ids": ids[None, here], "position_ids": positions[None, here]}
    yield inputs | {"use_cache": False, "lengths": lengths}, labels[here], _labelled(labels)


@contextmanager
def torch_cp(pack: Pack) -> Iterator[Call]:
    from torch.distributed.tensor.experimental import context_parallel

    ids, labels, positions = (x[None].clone() for x in pack[:3])
    total = _labelled(labels)
    buffers = [ids, labels, positions]
    with context_parallel(
        _mesh(), buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)
    ):
        yield {"input_ids": ids, "position_ids": positions, "use_cache": False}, labels[0], total


@cache
def _mesh() -> DeviceMesh:
    return init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("cp",))


def _labelled(labels: torch.Tensor) -> int:
    return int((labels >= 0).sum())
