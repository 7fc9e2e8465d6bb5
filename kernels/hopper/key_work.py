"""What the programs of a backward walk: the map of key tiles, and the order of its work items."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hexiseq_triton.kernels.backward_inputs import BackwardInputs
from hexiseq_triton.kernels.configs import Config, num_sms
from hexiseq_triton.kernels.hopper.order import work_order
from hexiseq_triton.kernels.tilemap import TileMap, build_map, key_tiles
from hexiseq_triton.segments import Mask


class KeyWork(NamedTuple):
    """Work of `num_programs`; `items` as `work_order` returns them, on the card."""

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
    mask, keep_empty = launch.options.mask, not inputs.accumulate
    m, n = config.block_m, config.block_n
    tiles = key_tiles(queries, keys, mask, m, n, device, keep_empty=keep_empty)
    num_items = tiles.num_tiles * launch.num_kv_heads
    if not num_items:
        return None
    programs = min(num_items, max(1, num_sms(device) - inputs.sm_margin))
    swapped = Mask(mask.right, mask.left)
    on_host = build_map(keys, queries, swapped, n, m, keep_empty=keep_empty)
    order = work_order(*on_host, keys, launch.num_kv_heads, programs, m)
    items = torch.from_numpy(order).pin_memory().to(device, non_blocking=True)
    return KeyWork(tiles, items, programs)
