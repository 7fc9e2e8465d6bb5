"""Attention forward over a tile map, with state that survives the launch.

A program keeps, for each row of its query tile, the largest score m so far, the total l of
exp(s - m) and the weighted sum of values:

    m'   = max(m, max s)
    l'   = exp(m - m') l   + sum exp(s - m')
    acc' = exp(m - m') acc + exp(s - m') v

A row of running state (o, lse) is the same thing with m = lse, l = 1 and the sum o. It joins after
the last key: one more step of the same form, and then o = acc / l, lse = m + log l. A learnable
sink adds exp(sink - m) to the l that divides acc, at the last launch; lse leaves it out.

Inside, scores are in base 2: exp(s) = exp2(s log2 e), and scale * log2 e is applied after the
maximum is found, one multiply-add for each score. A row without keys keeps m = -inf and l = 0.

Layout: q [T, H, D], k and v [T_kv, H_kv, D] with any strides but the last, which is 1;
o as q in float32, lse [H, T] float32 in natural log.
Source: Milakov and Gimelshein, arXiv:1805.02867; Dao, arXiv:2307.08691.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

from hexiseq_triton.kernels.blocks import (
    LN2,
    LOG2E,
    NOWHERE,
    VARYING,
    capped,
    dot,
    key_range,
    load_block,
    load_span,
    load_tile,
    product,
    store_block,
    visible,
    work_item,
)
from hexiseq_triton.kernels.configs import Config
from hexiseq_triton.kernels.forms import bounded_blocks, form, forms
from hexiseq_triton.kernels.forward_call import ForwardCall
from hexiseq_triton.kernels.hopper import guard
from hexiseq_triton.kernels.interned import interned
from hexiseq_triton.kernels.kept import kept
from hexiseq_triton.kernels.launch_tables import FORWARD, config_for
from hexiseq_triton.kernels.options import AttentionOptions, HeadMap, Segments
from hexiseq_triton.kernels.prepared import Prepared
from hexiseq_triton.kernels.tilemap import query_tiles
from hexiseq_triton.segments import Segment


@triton.jit
def _attend(
    acc, m, total, q, k, v, row, num_rows, kv_head, stride_kt, stride_kh, stride_vt, stride_vh,
    low, high, k_position, scale, cap_scale, cap,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr,
    HAS_LEFT: tl.constexpr, SOFTCAP: tl.constexpr,
    DESCRIPTORS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Let the tile see keys [row, row + BLOCK_N), of which `num_rows` exist."""
    keys = load_block(
        k, row, num_rows, kv_head, stride_kt, stride_kh, BLOCK_N, HEAD_DIM, D,
        not MASKED, DESCRIPTORS,
    )  # fmt: skip
    # [BLOCK_M, BLOCK_N]
    s = product(q, tl.trans(keys), UPCAST)
    if SOFTCAP:
        s = cap * capped(s, cap_scale, keys.dtype)
    if MASKED:
        offsets = tl.arange(0, BLOCK_N)
        positions = tl.where(offsets < num_rows, k_position + offsets, NOWHERE)
        seen = visible(positions[None, :], low[:, None], high[:, None], HAS_LEFT)
        s = tl.where(seen, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    pivot = m_new
    if MASKED:
        pivot = tl.where(m_new == float("-inf"), 0.0, m_new)  # keeps -inf - -inf out of exp2
    p = tl.exp2(s * scale - pivot[:, None])
    shrink = tl.exp2(m - pivot)
    total = total * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None]
    values = load_block(
        v, row, num_rows, kv_head, stride_vt, stride_vh, BLOCK_N, HEAD_DIM, D,
        not MASKED, DESCRIPTORS,
    )  # fmt: skip
    acc = dot(p.to(values.dtype), values, acc, UPCAST)
    return acc, m_new, total


@triton.jit
def _add_rows(
    acc, weight, source, num_rows, stride_row, FIRST: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Return acc + weight * columns [FIRST, FIRST + WIDTH) of rows [0, num_rows), [ROWS, WIDTH].

    By the half, down to 64 columns: what is loaded at once must fit the registers beside acc.
    """
    if WIDTH > 64:
        HALF: tl.constexpr = WIDTH // 2
        left, right = tl.split(tl.permute(tl.reshape(acc, [ROWS, 2, HALF]), [0, 2, 1]))
        left = _add_rows(left, weight, source, num_rows, stride_row, FIRST, ROWS, HALF, HEAD_DIM)
        right = _add_rows(
            right, weight, source, num_rows, stride_row, FIRST + HALF, ROWS, HALF, HEAD_DIM
        )
        acc = tl.reshape(tl.permute(tl.join(left, right), [0, 2, 1]), [ROWS, WIDTH])
    else:
        rows, columns = tl.arange(0, ROWS)[:, None], FIRST + tl.arange(0, WIDTH)[None, :]
        inside = (rows < num_rows) & (columns < HEAD_DIM)
        old = tl.load(source + (rows * stride_row + columns), mask=inside, other=0.0)
        acc += weight[:, None] * old
    return acc


@triton.jit
def _forward_tile(
    step, q, k, v, edge_v, o, lse, out, sink, tile_map,
    num_tiles, num_heads, heads_together, q_head_start, q_per_kv,
    scale, cap_scale, cap, left, right,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
    stride_ot, stride_oh, stride_lse, stride_outt, stride_outh,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, HAS_SINK: tl.constexpr,
    DESCRIPTORS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    tile, head = work_item(step, num_tiles, num_heads, heads_together)
    row, num_rows, position, full_begin, edge_begin, edge_end = load_tile(tile_map, tile)
    kv_head = (q_head_start + head) // q_per_kv - q_head_start // q_per_kv
    offsets = tl.arange(0, BLOCK_M)
    in_tile = offsets < num_rows
    low, high = key_range(position + offsets, left, right, HAS_LEFT, HAS_RIGHT)
    # [BLOCK_M, D]
    queries = load_block(
        q, row, num_rows, head, stride_qt, stride_qh, BLOCK_M, HEAD_DIM, D, False, DESCRIPTORS
    )

    lse_at = lse + head.to(tl.int64) * stride_lse + row + offsets
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)

    for span in tl.range(full_begin, edge_begin, disable_licm=True):
        k_row, k_rows, k_position = load_span(tile_map, num_tiles, span)
        for at in tl.range(0, k_rows, BLOCK_N):
            acc, m, total = _attend(
                acc, m, total, queries, k, v, k_row + at, k_rows - at, kv_head,
                stride_kt, stride_kh, stride_vt, stride_vh,
                low, high, k_position + at, scale, cap_scale, cap,
                BLOCK_N, HEAD_DIM, D, False, HAS_LEFT, SOFTCAP, DESCRIPTORS, UPCAST,
            )  # fmt: skip
    for span in tl.range(edge_begin, edge_end, disable_licm=True):
        k_row, k_rows, k_position = load_span(tile_map, num_tiles, span)
        for at in tl.range(0, k_rows, BLOCK_N):
            acc, m, total = _attend(
                acc, m, total, queries, k, edge_v, k_row + at, k_rows - at, kv_head,
                stride_kt, stride_kh, stride_vt, stride_vh,
                low, high, k_position + at, scale, cap_scale, cap,
                BLOCK_N, HEAD_DIM, D, True, HAS_LEFT, SOFTCAP, DESCRIPTORS, UPCAST,
            )  # fmt: skip

    top = m
    if not FIRST:  # the old state joins here, where registers are free
        old = tl.load(lse_at, mask=in_tile, other=float("-inf")) * LOG2E
        top = tl.maximum(m, old)
    some = top > float("-inf")
    pivot = tl.where(some, top, 0.0)
    weight = tl.exp2(m - pivot)
    total = total * weight
    if not FIRST:
        old_weight = tl.exp2(old - pivot)
        total += old_weight
    new_lse = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) * LN2, float("-inf"))
    tl.store(lse_at, new_lse, mask=in_tile)
    if HAS_SINK:
        total += tl.exp2(tl.load(sink + head) * LOG2E - pivot)
    inverse = tl.where(some, 1.0 / tl.where(some, total, 1.0), 0.0)
    acc = acc * (weight * inverse)[:, None]
    if not FIRST:
        start = o + row.to(tl.int64) * stride_ot + head.to(tl.int64) * stride_oh
        acc = _add_rows(
            acc, old_weight * inverse, start, num_rows, stride_ot, 0, BLOCK_M, D, HEAD_DIM
        )
    if LAST:
        store_block(
            out, acc, row, num_rows, head, stride_outt, stride_outh, BLOCK_M, HEAD_DIM, D, False
        )
    else:
        store_block(o, acc, row, num_rows, head, stride_ot, stride_oh, BLOCK_M, HEAD_DIM, D, False)


@triton.jit(do_not_specialize=VARYING)
def _forward_kernel(
    q, k, v, edge_v, o, lse, out, sink, tile_map,
    num_tiles, num_heads, heads_together, q_head_start, q_per_kv,
    scale, cap_scale, cap, left, right,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
    stride_ot, stride_oh, stride_lse, stride_outt, stride_outh,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, HAS_SINK: tl.constexpr,
    DESCRIPTORS: tl.constexpr, UPCAST: tl.constexpr,
    PERSISTENT: tl.constexpr,
):  # fmt: skip
    if PERSISTENT:
        for step in tl.range(
            tl.program_id(0), num_tiles * num_heads, tl.num_programs(0), disable_licm=True
        ):
            _forward_tile(
                step, q, k, v, edge_v, o, lse, out, sink, tile_map,
                num_tiles, num_heads, heads_together, q_head_start, q_per_kv,
                scale, cap_scale, cap, left, right,
                stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
                stride_ot, stride_oh, stride_lse, stride_outt, stride_outh,
                BLOCK_M, BLOCK_N, HEAD_DIM, D, HAS_LEFT, HAS_RIGHT, SOFTCAP,
                FIRST, LAST, HAS_SINK, DESCRIPTORS, UPCAST,
            )  # fmt: skip
    else:
        _forward_tile(
            tl.program_id(0), q, k, v, edge_v, o, lse, out, sink, tile_map,
            num_tiles, num_heads, heads_together, q_head_start, q_per_kv,
            scale, cap_scale, cap, left, right,
            stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
            stride_ot, stride_oh, stride_lse, stride_outt, stride_outh,
            BLOCK_M, BLOCK_N, HEAD_DIM, D, HAS_LEFT, HAS_RIGHT, SOFTCAP,
            FIRST, LAST, HAS_SINK, DESCRIPTORS, UPCAST,
        )  # fmt: skip


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor | None,
    lse: torch.Tensor,
    q_segments: Sequence[Segment],
    kv_segments: Segments,
    heads: HeadMap,
    options: AttentionOptions,
    *,
    first: bool = False,
    out: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    sm_margin: int = 0,
) -> None:
    """Let the queries see one more chunk of keys: update (o, lse) in place.

    Args:
        q: queries, [T, H, D] bf16, fp16 or fp32; D is a multiple of 8 up to 256.
        k: keys, [T_kv, H_kv, D] in the dtype of q.
        v: values, as k.
        o: running output, [T, H, D] fp32. None where nothing is read from it or written to it:
            with `first` and `out`.
        lse: running log-sum-exp, [H, T] fp32 in nats, last stride 1.
        q_segments: positions of the queries.
        kv_segments: positions of the keys.
        heads: which KV head each query head reads.
        options: mask, scale and softcap.
        first: there is no state yet; o and lse are written, and never read.
        out: this is the last chunk; the output goes here, [T, H, D] in any float dtype, and o
            stays as it was. Rows without keys get 0.
        sink: with `out`, one more logit of each query head, [H] fp32 in nats, contiguous.
        sm_margin: multiprocessors to leave to other kernels.

    Raises:
        ValueError: if a dtype, head dimension, shape or stride is not supported.
    """
    read, written = (out if o is None else o), (o if out is None else out)
    if read is None or written is None or (o is None and not first):
        raise ValueError("o is None; only a launch that is first and writes `out` needs no o")
    if sink is not None and out is None:
        raise ValueError("sink is given without `out`; it joins at the last launch only")
    f_q, f_k, f_v, f_read, f_lse, f_written = forms((q, k, v, read, lse, written))
    call = ForwardCall(
        f_q, f_k, f_v, f_read, f_lse, f_written, None if sink is None else form(sink),
        interned(q_segments), interned(kv_segments), heads, options,
        first, out is not None, sm_margin,
    )  # fmt: skip
    if guard.runs("forward", q):
        on_hopper = prepare_hopper(call)
        if on_hopper is not None:
            on_hopper(q, k, v, read, lse, written, sink)
            return
    config = config_for(FORWARD, q, sm_margin)
    launch = prepare_forward(call, config)
    if launch is not None:
        launch(*forward_tensors(q, k, v, read, lse, written, sink))


@kept
def prepare_hopper(call: ForwardCall) -> Callable[..., None] | None:
    """Check everything and return the Hopper kernel's launch, of (q, k, v, o, lse, out, sink).

    None where the copy engine can't take the tensors, or there is nothing to do.
    """
    from hexiseq_triton.kernels.hopper import forward as hopper  # needs Gluon

    return hopper.prepare(call)


def forward_tensors(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    read: torch.Tensor,
    lse: torch.Tensor,
    written: torch.Tensor,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return what a launch of `prepare_forward` takes: v whole and v bounded, and never None."""
    return q, k, v, v, read, lse, written, lse if sink is None else sink


@kept
def prepare_forward(call: ForwardCall, config: Config) -> Prepared | None:
    """Check everything and return the launch; None where there is nothing to do."""
    launch, q, k, v = call.launch(), call.q, call.k, call.v
    tiles = query_tiles(
        call.q_segments.segments, call.kv_segments.segments, call.options.mask,
        config.block_m, config.block_n, q.device, keep_empty=call.first or call.last,
    )  # fmt: skip
    items = tiles.num_tiles * q.shape[1]
    if not items:
        return None
    descriptors = config.descriptors and launch.fits_descriptors(q, k, v)
    cut = ((q, config.block_m), (k, config.block_n), (v, config.block_n))
    blocks = [x.blocks(rows) if descriptors else None for x, rows in cut]
    # only values that the mask takes out need their bound: scores of such keys are replaced
    blocks.append(bounded_blocks(v, config.block_n) if descriptors else None)
    programs = config.num_programs(items, q.device, call.sm_margin)
    scalars = (
        tiles.num_tiles,
        q.shape[1],
        launch.kv_heads_together(k, 2, 1) * call.heads.q_per_kv,
        *launch.scalars,
        *q.row_strides,
        *k.row_strides,
        *v.row_strides,
        *call.read.row_strides,
        call.lse.strides[0],
        *call.written.row_strides,
    )
    constants = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        **launch.flags,
        "FIRST": call.first,
        "LAST": call.last,
        "HAS_SINK": call.sink is not None,
        "DESCRIPTORS": descriptors,
        "PERSISTENT": programs < items,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    return Prepared(
        _forward_kernel, (programs,), scalars, constants,
        tiles=tiles, blocks=[*blocks, None, None, None, None],
    )  # fmt: skip
