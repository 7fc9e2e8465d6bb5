"""The ragged all-to-all inside a head-parallel group: tokens to heads, and heads to tokens.

A rank holds s_d tokens of all heads, and afterwards its heads of all L_g tokens. It packs once, per
destination; the blocks it receives stand one after the other and already are the result. Keys and
values go in one tensor per atomic head interval, [L_g, 2, heads, D].
"""

from __future__ import annotations

import torch

from hexiseq_triton.channel import Channel, Message, Pending
from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.planner.heads import HeadRange

KV = dict[HeadRange, torch.Tensor]
"""For each atomic interval of KV heads, keys and values [L_g, 2, heads, D]."""


def start_kv_to_heads(
    channel: Channel, layout: BatchLayout, k: torch.Tensor, v: torch.Tensor
) -> tuple[KV, Pending]:
    """Start moving k and v [s_d, H_kv, D] to the ranks whose query heads read them."""
    packed = {
        interval: torch.stack((k[:, slice(*interval)], v[:, slice(*interval)]), dim=1)
        for share in layout.shares
        for interval in layout.intervals(share)
    }
    total = layout.group_rows[-1][1]
    kv = {
        interval: k.new_empty(total, 2, interval[1] - interval[0], k.shape[-1])
        for interval in layout.intervals(layout.share)
    }
    sends = [
        (share.rank, packed[interval])
        for share in layout.shares
        for interval in layout.intervals(share)
    ]
    receives = [
        (share.rank, kv[interval][slice(*rows)])
        for share, rows in zip(layout.shares, layout.group_rows, strict=True)
        for interval in kv
    ]
    return kv, channel.start(sends, receives, "the all-to-all of keys and values")


def start_to_heads(
    channel: Channel, layout: BatchLayout, x: torch.Tensor, what: str
) -> tuple[torch.Tensor, Pending]:
    """Start moving x [s_d, H, ...] to [L_g, h_d, ...], this rank's query heads of all tokens."""
    if len(layout.shares) == 1:
        return x, Pending((), (), what)
    total = layout.group_rows[-1][1]
    received = x.new_empty(total, layout.share.num_q_heads, *x.shape[2:])
    sends = [(share.rank, x[:, slice(*share.q_heads)].contiguous()) for share in layout.shares]
    receives = [
        (share.rank, received[slice(*rows)])
        for share, rows in zip(layout.shares, layout.group_rows, strict=True)
    ]
    return received, channel.start(sends, receives, f"the all-to-all of {what}")


def to_tokens(channel: Channel, layout: BatchLayout, x: torch.Tensor, what: str) -> torch.Tensor:
    """Move x [L_g, h_d, ...] back to [s_d, H, ...], all heads of this rank's tokens."""
    if len(layout.shares) == 1:
        return x
    blocks = [
        x.new_empty(layout.num_tokens, share.num_q_heads, *x.shape[2:]) for share in layout.shares
    ]
    sends = [
        (share.rank, x[slice(*rows)].contiguous())
        for share, rows in zip(layout.shares, layout.group_rows, strict=True)
    ]
    receives = [(share.rank, block) for share, block in zip(layout.shares, blocks, strict=True)]
    channel.start(sends, receives, f"the all-to-all of {what}").wait()
    in_head_order = sorted(zip(layout.shares, blocks, strict=True), key=lambda b: b[0].q_heads)
    return torch.cat([block for _, block in in_head_order], dim=1)


def dkv_to_tokens(channel: Channel, layout: BatchLayout, dkv: KV, total: torch.Tensor) -> None:
    """Move dK and dV [L_g, 2, heads, D] to their tokens' owners and add them to `total`.

    `total` is [s_d, 2, H_kv, D] in the dtype of dkv. Where a KV head is replicated its parts are
    added in the group's rank order, so the sum is the same in every run.
    """
    sends: list[Message] = [
        (share.rank, part[slice(*rows)])
        for share, rows in zip(layout.shares, layout.group_rows, strict=True)
        for part in dkv.values()
    ]
    blocks = [
        (
            share.rank,
            interval,
            total.new_empty(*total.shape[:2], interval[1] - interval[0], total.shape[-1]),
        )
        for share in layout.shares
        for interval in layout.intervals(share)
    ]
    receives = [(rank, block) for rank, _, block in blocks]
    channel.start(sends, receives, "the all-to-all of key and value gradients").wait()
    for _, interval, block in blocks:
        total[:, :, slice(*interval)] += block
