"""What the kernels of a backward walk and load: the map of key tiles, the order of its work items,
and the arguments that all of them take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from hexiseq_triton.kernels.backward_inputs import BackwardInputs
from hexiseq_triton.kernels.configs import Config, num_sms
from hexiseq_triton.kernels.hopper.api import GluonBlocks, with_layout
from hexiseq_triton.kernels.hopper.order import work_order
from hexiseq_triton.kernels.kept import count_table
from hexiseq_triton.kernels.tilemap import TileMap, key_tiles


class KeyWork(NamedTuple):
    """Work of `num_programs`; `items` as `work_order` returns them, on the card.

    Where `tiles` have arrived, so have the items.
    """

    tiles: TileMap
    items: torch.Tensor
    num_programs: int

    @property
    def num_items(self) -> int:
        return self.items.shape[0]


def key_work(inputs: BackwardInputs, config: Config) -> KeyWork | None:
    """Return the work of a call; None where there is nothing to do."""
    launch, device = inputs.launch, inputs.q.device
    queries, keys = inputs.segments
    m, n = config.block_m, config.block_n
    tiles = key_tiles(
        queries, keys, launch.options.mask, m, n, device, keep_empty=not inputs.accumulate
    )
    num_items = tiles.num_tiles * launch.num_kv_heads
    if not num_items:
        return None
    programs = min(num_items, max(1, num_sms(device) - inputs.sm_margin))
    order = work_order(tiles.on_host, tiles.num_tiles, keys, launch.num_kv_heads, programs, m)
    count_table(order.nbytes)
    items = torch.from_numpy(order).pin_memory().to(device, non_blocking=True)
    stream = torch.cuda.current_stream(device)
    tiles = replace(tiles, ready=stream.record_event(), stream=stream.cuda_stream)
    return KeyWork(tiles, items, programs)


def loaded_blocks(inputs: BackwardInputs, config: Config) -> list[GluonBlocks]:
    """Return how the copy engine cuts q, k, v and do."""
    blocks = inputs.bounded_blocks(config)[:4]
    return [with_layout(x, inputs.q.dtype) for x in blocks if x is not None]


def scalars_of(inputs: BackwardInputs) -> tuple[int | float, ...]:
    """Return the arguments from q_head_start to the row stride of lse and delta."""
    launch, strides = inputs.launch, inputs.strides
    return (*launch.scalars, launch.options.softmax_scale, *strides[1:8:2], strides[8])


def constants_of(inputs: BackwardInputs, config: Config) -> dict[str, Any]:
    """Return the compile-time arguments but for the blocks' sizes."""
    return {
        "D": inputs.launch.head_dim,
        "STAGES": config.num_stages,
        **inputs.launch.score_flags,
        "ACCUMULATE": inputs.accumulate,
        "num_warps": config.num_warps,
    }
