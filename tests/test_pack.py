"""Pack and unpack: the Triton kernel equals its definition, exactly where it only copies.

On a GPU the kernel is compiled, elsewhere it runs in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import pytest
import torch
from assertions import assert_as_close_as
from pack_runs import DEVICE, FP32, INTERPRETED, MARKS, ROTATIONS, random, rotation_of

from hexiseq_triton.kernels import pack as kernel
from hexiseq_triton.kernels import pack_reference as reference
from hexiseq_triton.kernels.pieces import Piece, Pieces, Place
from hexiseq_triton.kernels.rotation import Rotation

pytestmark = MARKS
BF16, FP16, FP64 = torch.bfloat16, torch.float16, torch.float64
HEADS, KV_HEADS = 11, 3


def pieces_of(num_tokens: int) -> tuple[Pieces, int, int]:
    """Return pieces of k, v [T, 3, D] and q [T, 11, D], and the slots of `away` and `own`.

    KV head 1 has three places, one of them in `own`; q's last two heads stay there too.
    """
    pieces = []
    for tensor in (0, 1):
        first = 10 * num_tokens * tensor
        second = first + 2 * num_tokens
        places = [
            [Place(False, first, 2)],
            [Place(False, first + 1, 2), Place(False, second, 6), Place(True, 5 + tensor, 7)],
            [Place(False, second + 2, 6)],
        ]
        pieces += [
            Piece(tensor, (head, head + 1), tensor == 0, tuple(stands_at))
            for head, stands_at in enumerate(places)
        ]
    pieces += [
        Piece(2, (0, 9), True, (Place(False, 20 * num_tokens, 9),)),
        Piece(2, (9, 11), True, (Place(True, 5 + 3, 7),)),
    ]
    return Pieces(pieces), 29 * num_tokens, 5 + 7 * num_tokens


def fused_qkv(num_tokens: int, head_dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return k, v and q as views of one projection."""
    x = random(num_tokens, HEADS + 2 * KV_HEADS, head_dim, dtype=dtype)
    return [x[:, HEADS : HEADS + KV_HEADS], x[:, HEADS + KV_HEADS :], x[:, :HEADS]]


def packed(
    movers: ModuleType, tensors: Sequence[torch.Tensor], rotation: Rotation | None = None
) -> list[torch.Tensor]:
    """Return `away` and `own`, NaN where nothing was written."""
    num_tokens, _, head_dim = tensors[0].shape
    pieces, *slots = pieces_of(num_tokens)
    buffers = [tensors[0].new_full((count, head_dim), torch.nan) for count in slots]
    movers.pack(tensors, *buffers, pieces, rotation)
    return buffers


def unpacked(
    movers: ModuleType,
    buffers: Sequence[torch.Tensor],
    dtype: torch.dtype,
    rotation: Rotation | None = None,
) -> list[torch.Tensor]:
    """Return k, v and q, NaN where nothing was written."""
    head_dim = buffers[0].shape[1]
    num_tokens = (len(buffers[1]) - 5) // 7
    tensors = [
        buffers[0].new_full((num_tokens, heads, head_dim), torch.nan, dtype=dtype)
        for heads in (KV_HEADS, KV_HEADS, HEADS)
    ]
    movers.unpack(*buffers, tensors, pieces_of(num_tokens)[0], rotation)
    return tensors


def assert_same(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


# -------------------------------------------------------------------- the kernel


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(("num_tokens", "head_dim"), [(1, 64), (37, 8), (17, 80), (130, 128)])
def test_heads_are_copied_exactly(num_tokens: int, head_dim: int, dtype: torch.dtype) -> None:
    tensors = fused_qkv(num_tokens, head_dim, dtype)
    assert_same(packed(kernel, tensors), packed(reference, tensors))


@pytest.mark.parametrize("name", ROTATIONS)
@pytest.mark.parametrize("head_dim", [8, 24, 128, 256])
def test_heads_turn_on_their_way(head_dim: int, name: str) -> None:
    tensors = fused_qkv(21, head_dim, FP32)
    rotation = rotation_of(name, 21, head_dim)
    for a, b in zip(
        packed(kernel, tensors, rotation), packed(reference, tensors, rotation), strict=True
    ):
        torch.testing.assert_close(a, b, equal_nan=True, rtol=1e-6, atol=1e-6)
    buffers = [random(len(b), head_dim, seed=i) for i, b in enumerate(packed(kernel, tensors))]
    for a, b in zip(
        unpacked(kernel, buffers, FP32, rotation),
        unpacked(reference, buffers, FP32, rotation),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ROTATIONS)
def test_half_precision_is_rounded_once(name: str, dtype: torch.dtype) -> None:
    tensors = fused_qkv(33, 64, dtype)
    rotation = rotation_of(name, 33, 64, dtype)
    truncates = INTERPRETED and dtype == BF16  # so the interpreter casts
    exact = packed(reference, [x.double() for x in tensors], rotation)
    for a, b, c in zip(
        packed(kernel, tensors, rotation), exact, packed(reference, tensors, rotation), strict=True
    ):
        written = ~b.isnan()
        assert_as_close_as(a[written], b[written], c[written], leniency=4.0 if truncates else 1.0)


@pytest.mark.parametrize("dtype", [FP16, FP32] if INTERPRETED else [BF16, FP16, FP32])
def test_replicas_are_added_in_order_and_rounded_once(dtype: torch.dtype) -> None:
    buffers = [random(count, 128, seed=count) for count in pieces_of(29)[1:]]
    found = unpacked(kernel, buffers, dtype)
    assert_same(found, unpacked(reference, buffers, dtype))
    away, own = buffers
    t = 13
    by_hand = away[1 + 2 * t] + away[2 * 29 + 6 * t] + own[5 + 7 * t]
    assert torch.equal(found[0][t, 1], by_hand.to(dtype))


def test_offsets_pass_two_to_the_31() -> None:
    stride = 2**30 + 8
    storage = torch.empty(2 * stride + 4 * 8, dtype=FP16, device=DEVICE)  # 4 GiB, mostly untouched
    far = storage.as_strided((3, 1, 8), (stride, 8, 1))
    far.copy_(random(3, 1, 8, dtype=FP16))
    assert far.stride(0) * 2 >= 2**31
    pieces = Pieces([Piece(0, (0, 1), False, (Place(True, 0, 1),))])
    near = far.new_empty(3, 8)
    kernel.pack((far,), near[:0], near, pieces)
    assert torch.equal(near, far[:, 0])
    far.zero_()
    kernel.unpack(near[:0], near, (far,), pieces)
    assert torch.equal(near, far[:, 0])


def test_another_default_device_leaves_the_tables_where_they_belong() -> None:
    pieces = Pieces([Piece(0, (0, 3), False, (Place(True, 0, 3),))])
    with torch.device("meta"):
        tables = pieces.tables(torch.device(DEVICE))
    assert tables.chunks.tolist() == [[0, 0, 3, 0, 0, 1]]
    assert tables.places.tolist() == [[1, 0, 3]]


@pytest.mark.skipif(INTERPRETED, reason="needs streams")
def test_another_stream_waits_for_the_tables() -> None:
    x = random(40, 3, 64)
    torch.cuda.synchronize()
    pieces = Pieces([Piece(0, (0, 3), False, (Place(True, 0, 3),))])
    packed = x.new_full((2, 120, 64), torch.nan)
    for buffer, cycles in zip(packed, (1 << 28, 0), strict=True):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(cycles)
            kernel.pack((x,), buffer[:0], buffer, pieces)
    torch.cuda.synchronize()
    assert_same(packed, [x.flatten(0, 1)] * 2)


def test_nothing_to_move_is_no_launch() -> None:
    empty = random(0, 8)
    kernel.pack((random(0, 3, 8),), empty, empty, Pieces([Piece(0, (0, 3), False, ())]))
    kernel.unpack(empty, empty, (random(5, 3, 8),), Pieces([]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": random(4, 2, 8).double()}, "tensor 0 is torch.float64"),
        ({"x": random(4, 2, 12)}, "head dimension 12 is not supported"),
        ({"x": random(4, 2, 264)}, "head dimension 264 is not supported"),
        ({"x": random(4, 8)}, r"expected \[T, H, D\]"),
        ({"x": random(4, 8, 2).mT}, "last stride 2; it must be 1"),
        ({"x": random(4, 1, 8)}, "tensor 0 has 1 heads; its pieces 2"),
        ({"own": random(7, 8)}, "own has 7 slots; its pieces need 8"),
        ({"own": random(8, 16)}, r"expected \[slots, 8\], contiguous"),
        ({"own": random(8, 8).half()}, "own is torch.float16"),
        ({"rotation": Rotation(random(3, 4), random(3, 4))}, r"expected \[4, R / 2\]"),
        ({"rotation": Rotation(random(4, 5), random(4, 5))}, "10 dimensions turn"),
    ],
)
def test_what_is_not_supported_is_named(change: dict, message: str) -> None:
    good = {"x": random(4, 2, 8), "own": random(8, 8), "rotation": None} | change
    pieces = Pieces([Piece(0, (0, 2), True, (Place(True, 0, 2),))])
    away = good["own"][:0]
    if good["own"].dtype != FP32:
        away = random(0, 8)
    with pytest.raises(ValueError, match=message):
        kernel.pack((good["x"],), away, good["own"], pieces, good["rotation"])


# -------------------------------------------------------------------- the definition


@pytest.mark.parametrize("name", ROTATIONS)
def test_unpack_is_the_gradient_of_pack(name: str) -> None:
    """<pack(x), y> = <x, unpack(y)> for every x and y: what backward needs, replicas included."""
    x = [tensor.double() for tensor in fused_qkv(9, 16, FP32)]
    rotation = rotation_of(name, 9, 16, FP64)
    sent = packed(reference, x, rotation)
    y = [random(*buffer.shape, dtype=FP64, seed=5) for buffer in sent]
    back = unpacked(reference, y, FP64, rotation)
    left = sum(float((a * b).nansum()) for a, b in zip(sent, y, strict=True))
    right = sum(float((a * b).sum()) for a, b in zip(x, back, strict=True))
    assert left == pytest.approx(right, rel=1e-12)
