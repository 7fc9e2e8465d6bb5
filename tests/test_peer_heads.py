"""The all-to-all by shared memory: its messages' bits, and no barrier too few or too many.

What GPUs reach at each other is a file here, on five processes, and every access to it is noted.
Two ranks' accesses can only collide between the same two barriers; the rest is looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from equality import random_qkv
from pool import TIMEOUT, Pool
from shared_files import GroupMemory
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hexiseq_triton import peer_heads
from hexiseq_triton.attention import hexiseq_attention
from hexiseq_triton.context import ParallelContext, init
from hexiseq_triton.planner import ExchangePlan, Plan, Split

SHARED = Split((9, 0, 13), (4, 1, 1))
"""Ranks that hold the same KV head."""
APART = Split((10, 12), (3, 3))
PLANS = {
    "one group a replica": Plan.from_splits([SHARED], [APART], num_kv_heads=2),
    "groups that exchange keys": Plan.from_splits(
        [SHARED, APART], num_kv_heads=2, exchange=ExchangePlan(chunk_tokens=8)
    ),
}
_ALLOCATING = torch.ops.aten.new_empty.default, torch.ops.aten.empty_like.default
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Accesses(TorchDispatchMode):
    """Notes which bytes of the group's memory this rank touches, and writes, in each part."""

    def __init__(self, memory: GroupMemory) -> None:
        super().__init__()
        self._memory = memory
        self._noted: dict[tuple[int, bool], torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        named = [*zip(func._schema.arguments, args, strict=False)]
        named += [
            (each, kwargs[each.name]) for each in func._schema.arguments if each.name in kwargs
        ]
        for argument, value in [] if func.is_view or func in _ALLOCATING else named:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for x in tree_leaves(value):
                if isinstance(x, torch.Tensor):
                    self._note(x, writes)
        return func(*args, **kwargs)

    def _note(self, x: torch.Tensor, writes: bool) -> None:
        memory = self._memory
        if x.untyped_storage().data_ptr() != memory.everything.data_ptr():
            return
        key = memory.part, writes
        if key not in self._noted:
            self._noted[key] = torch.zeros_like(memory.everything)
        noted = self._noted[key].view(_INTEGERS[x.element_size()])
        noted.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(-1)

    def of_parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what was touched, and what of that was written, each [parts, bytes]."""
        nothing = torch.zeros_like(self._memory.everything)
        read, written = (
            torch.stack(
                [self._noted.get((i, kind), nothing) != 0 for i in range(self._memory.part + 1)]
            )
            for kind in (False, True)
        )
        return read | written, written


def collisions(context: ParallelContext, touched: torch.Tensor, written: torch.Tensor) -> int:
    """Return how many bytes one rank writes and another one touches."""
    counts = torch.stack([touched, written]).int()
    dist.all_reduce(counts, group=context.heads.group)
    return int(((counts[0] > 1) & (counts[1] > 0)).sum())


def passes(
    context: ParallelContext, dtype: torch.dtype, layouts: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Run layers of some layouts forward, and back; the first again before and after that."""
    found, leaves, held = [], [], []
    for seed, lengths in enumerate(layouts):
        tensors = random_qkv(context.plan, sum(lengths), 4, seed, dtype)
        batch = context.shard(tensors, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0))
        leaves.append([batch[name].requires_grad_() for name in "qkv"])
        held.append(batch.layout)
        found.append(hexiseq_attention(*leaves[-1], context, batch.layout, causal=True))
    loss = torch.cat(found).float().square().sum()
    for step in (lambda: None, loss.backward):
        step()
        with torch.no_grad():
            found.append(hexiseq_attention(*leaves[0], context, held[0], causal=True))
    return [x.detach() for x in found] + [x.grad for each in leaves for x in each]


def beside_messages(
    rank: int, folder: Path, plan: Plan, dtype: torch.dtype
) -> tuple[bool, int, list[int]]:
    """Worker: return whether results are those of messages, how many bytes collide, and how many
    would without one of the barriers, for each but the first."""
    torch.use_deterministic_algorithms(True)
    layouts = (19, 0, 3), (5, 12), (30,)
    with init(plan, device="cpu", timeout=TIMEOUT) as context:
        expected = passes(context, dtype, layouts)
        group = context.heads.group
        assert group is not None
        memory = GroupMemory(folder / f"group of {dist.get_process_group_ranks(group)[0]}", group)
        dist.barrier(group)
        context.peer_memory = memory  # type: ignore[assignment]
        with (
            mock.patch.object(peer_heads, "by_reference", return_value=False),
            Accesses(memory) as accesses,
        ):
            found = passes(context, dtype, layouts)
        touched, written = accesses.of_parts()
        same = all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        without = [
            collisions(context, touched[a] | touched[b], written[a] | written[b])
            for a, b in pairwise(range(1, len(touched)))
        ]
        return same, collisions(context, touched, written), without


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bf16"])
@pytest.mark.parametrize("name", PLANS)
def test_ranks_never_collide_and_would_without_any_of_the_barriers(
    pool: Pool, tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    for same, colliding, without in pool.run(beside_messages, tmp_path, PLANS[name], dtype):
        assert same
        assert colliding == 0
        barriers = 4 if len(PLANS[name].replicas) == 1 else 3  # keys and queries leave apart
        assert len(without) == 5 * barriers + 3 * 3 - 1
        assert min(without) > 0
