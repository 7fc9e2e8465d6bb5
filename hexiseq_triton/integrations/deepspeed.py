"""DeepSpeed with ZeRO 1 to 3: Ulysses' `DistributedAttention` under an uneven plan.

    attention = DistributedAttention(hx.HexiSeqAttention(context, causal=True))
    batch = context.shard({"ids": ids, "labels": labels}, cu_seqlens=cu_seqlens)
    out = attention(q, k, v, 0, layout=batch.layout)      # each [1, T, heads, D], this rank's rows

The forward signature is that of `deepspeed.sequence.layer.DistributedAttention`, whose further
arguments go to the local attention; here one of them, `layout`, says who holds which tokens. It
comes with the call and is not kept, so that a recomputed layer meets its own batch again. ZeRO
shards parameters and optimizer over all ranks, as without a plan. DeepSpeed is not imported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hexiseq_triton.errors import InputError
from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.module import HexiSeqAttention
from hexiseq_triton.rope import Rope

_OPTIONS = ("softmax_scale", "causal", "window_size", "softcap", "deterministic", "reduce_dtype")
"""What a call may repeat of the attention it was made with."""


class DistributedAttention(nn.Module):
    """Takes the place of DeepSpeed's class in a model.

    Args:
        local_attention: the attention with its context and options, instead of a local attention
            and a sequence process group.
    """

    def __init__(self, local_attention: HexiSeqAttention) -> None:
        super().__init__()
        if not isinstance(local_attention, HexiSeqAttention):
            raise InputError(
                f"local_attention is a {type(local_attention).__name__}; it must be a "
                "HexiSeqAttention, which knows its context"
            )
        self.local_attn = local_attention

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch_dim_idx: int,
        rotary_pos_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend over all tokens of the replica's batch; a collective call.

        Args:
            query: this rank's rows, [1, T, H, D], or [T, 1, H, D] where `batch_dim_idx` is 1.
            key: as query with H_kv heads.
            value: as key.
            batch_dim_idx: which dimension is the batch, 0 or 1; it holds one packed stream.
            rotary_pos_emb: (cos, sin) of this rank's rows, each [1, T, 1, R], by which the first R
                dimensions of q and k turn, half-split.
            args: only None.
            kwargs: `layout`, the batch's from `context.shard`; options of the local attention with
                the values it was made with; nothing else that is set.

        Returns:
            The output, in the shape and dtype of query.

        Raises:
            InputError: if `layout` is missing, or something is asked for that is not supported.
            PeerError: if another rank failed, with its message.
        """
        layout = kwargs.pop("layout", None)
        with self.local_attn.context.guard():
            self._check(query, batch_dim_idx, layout, args, kwargs)
            rope = _rope(rotary_pos_emb)
        rows = [x.squeeze(batch_dim_idx) for x in (query, key, value)]
        out: torch.Tensor = self.local_attn(*rows, layout, rope)
        return out.unsqueeze(batch_dim_idx)

    def _check(
        self,
        query: torch.Tensor,
        batch_dim_idx: int,
        layout: BatchLayout | None,
        args: tuple[Any, ...],
        options: dict[str, Any],
    ) -> None:
        if batch_dim_idx not in (0, 1):
            raise InputError(f"batch_dim_idx is {batch_dim_idx}; it must be 0 or 1")
        if not isinstance(layout, BatchLayout):
            raise InputError(
                "attention was called without layout=; pass the layout that context.shard returned"
            )
        if query.dim() != 4 or query.shape[batch_dim_idx] != 1:
            raise InputError(
                f"query has shape {tuple(query.shape)} with batch_dim_idx {batch_dim_idx}; "
                "it must hold one packed stream: [1, T, heads, D], or [T, 1, heads, D] with 1"
            )
        for place, given in enumerate(args, start=1):
            if given is not None:
                raise InputError(
                    f"argument {place} after rotary_pos_emb is a {type(given).__name__}; masks and "
                    "other arguments of a local attention are not supported: leave it out"
                )
        for name, given in options.items():
            if not self._honours(name, given):
                held = f", made with {getattr(self.local_attn, name)}" if name in _OPTIONS else ""
                shown = "a Tensor" if isinstance(given, torch.Tensor) else repr(given)
                raise InputError(
                    f"{name} is {shown}; this attention does not support it{held}: leave it out"
                )

    def _honours(self, name: str, given: Any) -> bool:
        """Return whether an argument asks for nothing else than what is done."""
        if given is None:
            return True
        if isinstance(given, torch.Tensor):
            return False
        return bool(given == getattr(self.local_attn, name)) if name in _OPTIONS else not given


def _rope(tables: tuple[torch.Tensor, torch.Tensor] | None) -> Rope | None:
    """Return what turns q and k, of tables in DeepSpeed's shape."""
    if tables is None:
        return None
    if len(tables) != 2 or not all(isinstance(table, torch.Tensor) for table in tables):
        raise InputError(
            f"rotary_pos_emb is a {type(tables).__name__} of {len(tables)}; it must be two "
            "tensors, (cos, sin)"
        )
    for name, table in zip(("cos", "sin"), tables, strict=True):
        if table.dim() != 4 or table.shape[0] != 1 or table.shape[2] != 1:
            raise InputError(
                f"rotary_pos_emb's {name} has shape {tuple(table.shape)}; it must be [1, T, 1, R]"
            )
    cos, sin = (table[0, :, 0] for table in tables)
    return Rope(cos, sin, rotary_dim=cos.shape[-1])
