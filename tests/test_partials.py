"""Adding partials: the Triton kernel and the definition against plain loops over rows.

On a GPU the kernel is compiled, elsewhere it runs in Triton's interpreter.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hexiseq_triton.kernels import add_partials as kernel  # noqa: E402
from hexiseq_triton.kernels.partials import Piece, add_partials, pieces_of  # noqa: E402

pytestmark = [
    *([pytest.mark.gpu] if DEVICE == "cuda" else []),
    # the interpreter turns loop bounds into ints
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]
FP32, FP64, FP16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16

# three partials: rows 2..7 and 9..12; 5..10; 30..70; each starts somewhere in the pool
PARTIALS = [([(2, 7), (9, 12)], 3), ([(5, 10)], 20), ([(30, 70)], 40)]

ranges = st.lists(st.integers(0, 40), max_size=6, unique=True).map(
    lambda edges: list(zip(sorted(edges)[::2], sorted(edges)[1::2], strict=False))
)


@given(st.lists(st.tuples(ranges, st.integers(0, 50)), max_size=5))
def test_every_row_gets_its_partials_in_order(partials: list) -> None:
    expected: dict[int, list[int]] = {}
    for held, source in partials:
        for start, stop in held:
            for row in range(start, stop):
                expected.setdefault(row, []).append(source)
                source += 1
    found: dict[int, list[int]] = {}
    for start, stop, sources in pieces_of(partials):
        for row in range(start, stop):
            assert row not in found
            found[row] = [source + row - start for source in sources]
    assert found == expected


def expected_sum(total: torch.Tensor, pool: torch.Tensor, pieces: tuple[Piece, ...]) -> None:
    """Add row by row, in place."""
    for start, stop, sources in pieces:
        for row in range(start, stop):
            for source in sources:
                total[row] += pool[source + row - start].to(total.dtype)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("rest", [(2, 3, 8), (2, 1, 40)], ids=str)
def test_the_kernel_adds_bit_for_bit_as_rows_are_added(
    rest: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    total = torch.randn(75, *rest, device=DEVICE)
    pool = torch.randn(90, *rest, device=DEVICE).to(dtype)
    pieces = pieces_of(PARTIALS)
    expected = total.clone()
    expected_sum(expected, pool, pieces)

    in_half = torch.full_like(total, torch.nan, dtype=FP16)
    kernel.add_partials(total, pool, pieces, in_half)
    kernel.add_partials(total, pool, pieces, total)

    assert torch.equal(total, expected)
    written = ~in_half.isnan().flatten(1).all(1)
    assert written.nonzero().flatten().tolist() == [*range(2, 12), *range(30, 70)]
    assert torch.equal(in_half[written], expected[written].half())


@pytest.mark.parametrize("dtype", [FP32, FP64], ids=["fp32", "fp64"])
def test_the_definition_adds_the_same(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    total, pool = torch.randn(75, 2, 3, 8, dtype=dtype), torch.randn(90, 2, 3, 8).bfloat16()
    pieces = pieces_of(PARTIALS)
    expected, out = total.clone(), total.clone()
    expected_sum(expected, pool, pieces)
    add_partials(total, pool, pieces, out)
    add_partials(total, pool, pieces)
    assert torch.equal(total, expected)
    assert torch.equal(out, expected)


def test_no_partials_and_no_elements_are_fine() -> None:
    total = torch.ones(4, 2, 1, 8, device=DEVICE)
    kernel.add_partials(total, total[:0], (), total)
    empty = total[:, :, :0].contiguous()
    kernel.add_partials(empty, empty, (Piece(0, 4, (0,)),), empty)
    assert (total == 1).all()


def test_what_does_not_fit_is_named() -> None:
    total = torch.zeros(4, 2, 8)
    with pytest.raises(ValueError, match=r"pool has shape \(4, 3, 8\)"):
        add_partials(total, torch.zeros(4, 3, 8), ())
    with pytest.raises(ValueError, match=r"total has shape .* contiguous"):
        add_partials(total.transpose(0, 1), total.transpose(0, 1), ())
    with pytest.raises(ValueError, match=r"total is torch\.bfloat16"):
        add_partials(total.bfloat16(), total, ())
