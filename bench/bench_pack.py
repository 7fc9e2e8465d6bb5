"""Pack and unpack of the head all-to-all, and the sum of returned partials: read GB/s; the ceiling
is `copy` in the same group.

Rank 0 of a group holds 64K tokens of 32 query and 8 KV heads, D 128, bf16, and the group's heads
are cut unevenly, so that some KV heads are replicated. Bytes are those read plus those written,
without the tables of cosines and sines. `copy` copies one buffer of the same bytes onto another,
`torch` slices, stacks and joins with PyTorch's own operators, RoPE before or after.

    pack                k, v, q to the send and the receive buffer
    unpack-o            the outputs' heads joined
    unpack-dq           the same for query gradients, turned back
    unpack-dkv          float32 parts of dK and dV added and turned back, written in bf16
    add-partials        partials of 8 KV heads' dK and dV, in float32 or bf16, of two ranks for the
                        same 16K rows, added to float32 in one pass; `torch` adds one by one

Partial RoPE turns a quarter of the head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import measure
import pytest
import torch

from hexiseq_triton.group_slots import GroupSlots, group_slots, members_of
from hexiseq_triton.kernels import add_partials as adding_kernel
from hexiseq_triton.kernels import pack as kernels
from hexiseq_triton.kernels import pack_reference as reference
from hexiseq_triton.kernels.partials import pieces_of
from hexiseq_triton.kernels.rotation import Rotation
from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.planner import Plan, Split

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

DEVICE = torch.device("cuda")
TOKENS, HEADS, KV_HEADS, HEAD_DIM = 65536, 32, 8, 128
HEADS_OF_RANK = {4: (12, 9, 6, 5), 8: (8, 6, 5, 4, 3, 3, 2, 1)}


@dataclass(frozen=True)
class Work:
    """One launch: what it moves, and the number of bytes it reads and writes."""

    run: Callable[[Any], None]
    num_bytes: int


def slots_of(num_ranks: int, **kinds: bool) -> GroupSlots:
    split = Split((TOKENS, *[1024] * (num_ranks - 1)), HEADS_OF_RANK[num_ranks])
    plan = Plan.from_splits([split], num_kv_heads=KV_HEADS)
    layout = BatchLayout(plan, 0, (sum(split.tokens),))
    return group_slots(members_of(layout), 0, **kinds)


@cache
def rotation_of(rope: str) -> Rotation | None:
    if rope == "none":
        return None
    turned = HEAD_DIM // 4 if rope.startswith("partial") else HEAD_DIM
    angles = torch.rand(TOKENS, turned // 2, device=DEVICE)
    return Rotation(angles.cos(), angles.sin(), rope.endswith("interleaved"))


def moved(slots: GroupSlots) -> int:
    """Return the slots that this rank's tokens fill: all of `away`, its own rows of `own`."""
    heads = (len(piece.places) * (piece.heads[1] - piece.heads[0]) for piece in slots.pieces)
    return TOKENS * sum(heads)


def work_of(direction: str, num_ranks: int, rope: str) -> Work:
    """Allocate the buffers and return the launch; `run` takes the module that moves."""
    kinds = {"pack": {"kv": True, "q": True}, "unpack-dkv": {"kv": True}}
    slots = slots_of(num_ranks, **kinds.get(direction, {"q": True}))
    tensors = [torch.randn(TOKENS, heads, HEAD_DIM, device=DEVICE) for heads in heads_of(direction)]
    tensors = [x.bfloat16() for x in tensors]
    dtype = torch.float32 if direction == "unpack-dkv" else torch.bfloat16
    away, own = (
        torch.zeros(count, HEAD_DIM, device=DEVICE, dtype=dtype)
        for count in (slots.num_away, slots.num_own)
    )
    num_bytes = sum(x.nbytes for x in tensors) + moved(slots) * HEAD_DIM * dtype.itemsize
    rotation = rotation_of(rope)

    def run(movers: Any) -> None:
        if direction == "pack":
            movers.pack(tensors, away, own, slots.pieces, rotation)
        else:
            movers.unpack(away, own, tensors, slots.pieces, rotation)

    return Work(run, num_bytes)


def heads_of(direction: str) -> tuple[int, ...]:
    return {"pack": (KV_HEADS, KV_HEADS, HEADS), "unpack-dkv": (KV_HEADS, KV_HEADS)}.get(
        direction, (HEADS,)
    )


def copy_of(num_bytes: int) -> Callable[[], object]:
    source = torch.zeros(num_bytes // 2, dtype=torch.uint8, device=DEVICE)
    return partial(torch.empty_like(source).copy_, source)


CASES = [
    ("pack", "none"),
    ("pack", "half"),
    ("pack", "interleaved"),
    ("pack", "partial-half"),
    ("pack", "partial-interleaved"),
    ("unpack-o", "none"),
    ("unpack-dq", "half"),
    ("unpack-dq", "interleaved"),
    ("unpack-dq", "partial-half"),
    ("unpack-dq", "partial-interleaved"),
    ("unpack-dkv", "none"),
    ("unpack-dkv", "half"),
]


@pytest.mark.parametrize("impl", ["copy", "torch", "hexiseq"])
@pytest.mark.parametrize(("direction", "rope"), CASES)
@pytest.mark.parametrize("num_ranks", [4, 8])
def bench_pack(benchmark: Any, num_ranks: int, direction: str, rope: str, impl: str) -> None:
    benchmark.group = f"pack {direction} rope-{rope} over {num_ranks} ranks"
    work = work_of(direction, num_ranks, rope)
    movers = {"torch": reference, "hexiseq": kernels}
    call = copy_of(work.num_bytes) if impl == "copy" else partial(work.run, movers[impl])
    ms = measure.timed(benchmark, call, seconds=0.2)
    case = f"d{HEAD_DIM}-t{TOKENS}-gqa{HEADS}x{KV_HEADS}-ranks{num_ranks}-rope-{rope}"
    measure.record(benchmark, "pack", case, impl, direction, ms, num_bytes=work.num_bytes)


@pytest.mark.parametrize("impl", ["copy", "torch", "hexiseq"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def bench_add_partials(benchmark: Any, dtype: torch.dtype, impl: str) -> None:
    rows, sources = 16384, 2
    benchmark.group = f"pack add-partials {dtype}"
    total = torch.zeros(rows, 2, KV_HEADS, HEAD_DIM, device=DEVICE)
    pool = torch.randn(sources * rows, *total.shape[1:], device=DEVICE).to(dtype)
    pieces = pieces_of([([(0, rows)], i * rows) for i in range(sources)])
    num_bytes = 2 * total.nbytes + pool.nbytes

    def one_by_one() -> None:
        for partial_sum in pool.split(rows):
            total.add_(partial_sum)

    calls: dict[str, Callable[[], object]] = {
        "copy": copy_of(num_bytes),
        "torch": one_by_one,
        "hexiseq": partial(adding_kernel.add_partials, total, pool, pieces, total),
    }
    ms = measure.timed(benchmark, calls[impl], seconds=0.2)
    case = f"d{HEAD_DIM}-t{rows}-kv{KV_HEADS}-sources{sources}-{str(dtype).removeprefix('torch.')}"
    measure.record(benchmark, "pack", case, impl, "add-partials", ms, num_bytes=num_bytes)
