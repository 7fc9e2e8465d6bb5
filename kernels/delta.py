"""delta = rowsum(do * o), the only thing that backward needs to know of the output.

Layout: do and o [T, H, D], delta [H, T] float32.
Source: Dao, arXiv:2307.08691, algorithm 2.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from hexiseq_triton.kernels.blocks import load_block
from hexiseq_triton.kernels.forms import Form, forms
from hexiseq_triton.kernels.kept import MOST_KEPT
from hexiseq_triton.kernels.prepared import Prepared

ROWS = 32


@triton.jit(do_not_specialize=["num_rows"])
def _delta_kernel(
    do, o, delta, num_rows, stride_dot, stride_doh, stride_ot, stride_oh, stride_delta,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS
    head = tl.program_id(1)
    left = num_rows - row
    # [ROWS, D]
    grads = load_block(
        do, row, left, head, stride_dot, stride_doh, ROWS, HEAD_DIM, D, False, False
    ).to(tl.float32)
    outputs = load_block(
        o, row, left, head, stride_ot, stride_oh, ROWS, HEAD_DIM, D, False, False
    ).to(tl.float32)
    offsets = tl.arange(0, ROWS)
    delta_at = delta + head.to(tl.int64) * stride_delta + row + offsets
    tl.store(delta_at, tl.sum(grads * outputs, 1), mask=offsets < left)


def row_dots(do: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
    """Return delta, [H, T] fp32.

    Args:
        do: gradient of the output, [T, H, D] in any float dtype, last stride 1.
        o: output, as do, in any float dtype.

    Raises:
        ValueError: if the shapes differ or a last stride is not 1.
    """
    launch = _prepare(*forms((do, o)))
    rows, heads, _ = do.shape
    delta = do.new_empty(heads, rows, dtype=torch.float32)
    if launch is not None:
        launch(do, o, delta)
    return delta


@lru_cache(maxsize=MOST_KEPT)
def _prepare(do: Form, o: Form) -> Prepared | None:
    """Check do and o and return the launch; None where there is nothing to do."""
    if do.shape != o.shape:
        raise ValueError(f"do has shape {tuple(do.shape)}, o has {tuple(o.shape)}")
    if not do.num_elements:
        return None
    if do.strides[-1] != 1 or o.strides[-1] != 1:
        raise ValueError(f"do and o have last strides {do.strides[-1]} and {o.strides[-1]}; both 1")
    rows, heads, head_dim = do.shape
    padded = max(16, triton.next_power_of_2(head_dim))
    constants = {"ROWS": ROWS, "HEAD_DIM": head_dim, "D": padded}
    return Prepared(
        _delta_kernel,
        (triton.cdiv(rows, ROWS), heads),
        (rows, *do.row_strides, *o.row_strides, rows),
        constants,
        blocks=[None, None, None],
    )
