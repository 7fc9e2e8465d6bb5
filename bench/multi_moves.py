"""The head all-to-all alone, without attention: q, k, v to their heads, and o back to its tokens.

bare         all_to_all_single of the same bytes, once each way: nothing is laid out
permuted     a copy, all_to_all_single and a copy, for each of q, k, v and o
hexiseq      by peer memory
hexiseq-nccl by messages
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch
import torch.distributed as dist
from multi_layouts import Shape, leaves, plan_of
from multi_peers import swapped

import hexiseq_triton as hx
from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.peer_heads import head_exchange


def _tensors(shape: Shape) -> list[torch.Tensor]:
    tokens = shape.tokens // dist.get_world_size()
    return [x.detach() for x in leaves(tokens, shape.q_heads, shape.kv_heads, shape.head_dim)]


def leaving_bytes(shape: Shape) -> float:
    """Return the bytes that leave one GPU."""
    world = dist.get_world_size()
    heads = 2 * shape.q_heads + 2 * shape.kv_heads
    return shape.tokens // world * heads * shape.head_dim * 2 * (world - 1) / world


def bare(shape: Shape, _: ExitStack) -> Callable[[], object]:
    q, k, v, o = _tensors(shape)
    sent = torch.cat([x.flatten() for x in (q, k, v)])
    got, got_o = torch.empty_like(sent), torch.empty_like(o)

    def call() -> None:
        dist.all_to_all_single(got, sent)
        dist.all_to_all_single(got_o, o)

    return call


def permuted(shape: Shape, _: ExitStack) -> Callable[[], object]:
    tensors = _tensors(shape)[:3]

    def call() -> None:
        q, _, _ = (swapped(x, to_heads=True) for x in tensors)
        swapped(q, to_heads=False)

    return call


def _hexiseq(shape: Shape, stack: ExitStack, *, symmetric: bool) -> Callable[[], object]:
    plan = plan_of("heads", shape, dist.get_world_size())
    context = stack.enter_context(hx.init(plan, symmetric_memory=symmetric))
    layout = BatchLayout(plan, context.rank, shape.lengths)
    q, k, v, _ = _tensors(shape)
    with torch.no_grad():
        outputs = torch.randn_like(q).view(shape.tokens, -1, shape.head_dim)

    def call() -> None:
        exchange = head_exchange(context, layout, q)
        inputs = exchange.start_inputs(q, k, v, None)
        inputs.kv_pending.wait()
        inputs.q_pending.wait()
        # attention would write here
        room = outputs if not symmetric else exchange.outputs_room(q)
        exchange.outputs_to_tokens(room)

    return call


MOVES: dict[str, Callable[[Shape, ExitStack], Callable[[], object]]] = {
    "bare": bare,
    "permuted": permuted,
    "hexiseq": lambda shape, stack: _hexiseq(shape, stack, symmetric=True),
    "hexiseq-nccl": lambda shape, stack: _hexiseq(shape, stack, symmetric=False),
}
