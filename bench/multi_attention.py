"""Attention under plans on several GPUs of one host, beside its peers; run by torchrun:

    torchrun --nproc-per-node 4 bench/multi_attention.py --label NAME [--seconds 150] [PART ...]

Forward and backward, causal, bf16, medians of the slowest rank. FLOPs are 3.5 times the forward's
4 H D pairs; TFLOP/s are those of the busiest GPU. The parts:

    alone      one GPU without communication on the shapes that ranks attend with: their tokens of
               the group, their heads. The denominator of efficiency.
    layouts    this package: see multi_layouts.py
    peers      see multi_peers.py
    documents  long-tailed documents, packed
    moves      the head all-to-all alone: q, k, v to heads and o back; see multi_moves.py

What the results already hold of the run is skipped: a run that was cut off goes on where it was.
"""

from __future__ import annotations

import argparse
import gc
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import torch
import torch.distributed as dist
from multi_layouts import (
    Shape,
    busiest_flops,
    largest_error,
    local,
    long_tailed,
    plan_of,
    planned,
)
from multi_moves import MOVES, leaving_bytes
from multi_peers import PEERS, Peer, Unsupported
from multi_timing import Results, slowest_ms, start_world

import hexiseq_triton as hx

DIRECTION = "forward+backward"
WHOLE = 3.5  # forward and backward, in forward FLOPs
SHORT, LONG = Shape((32768,)), Shape((131072,))
MOST_CHECKED = 65536
"""Tokens of layouts whose results are held against one GPU's before they are timed."""
TOLERANCE = 1e-2  # both sides round to bf16
MOVED = Shape((65536,))
DOCUMENTS = Shape(long_tailed(131072))
LAYOUTS = (
    "heads",
    "heads-nccl",
    "ring",
    "ring-nccl",
    "ring-spread",
    "hybrid",
    "hybrid-nccl",
    "uneven",
)
Setup = Callable[[ExitStack], tuple[Callable[[], object], float]]
"""Returns the call to time and its forward FLOPs on the busiest GPU; the stack is closed after."""
Job = tuple[str, str, Setup]
"""A case, an implementation, and its setup."""


def alone(shape: Shape) -> Iterator[Job]:
    world = dist.get_world_size()
    for tokens, ranks in ((shape.tokens, world), (shape.tokens // world, 1)):
        one = Shape((tokens,), shape.q_heads // ranks, shape.kv_heads // ranks, shape.head_dim)

        def setup(_: ExitStack, one: Shape = one) -> tuple[Callable[[], object], float]:
            call = local(one.tokens, one.q_heads, one.kv_heads, one.head_dim)
            return call, one.forward_flops

        yield one.case, "alone", setup


def layouts(shape: Shape, names: tuple[str, ...] = LAYOUTS) -> Iterator[Job]:
    for name in names:

        def setup(stack: ExitStack, name: str = name) -> tuple[Callable[[], object], float]:
            plan = plan_of(name.removesuffix("-nccl"), shape, dist.get_world_size())
            symmetric = not name.endswith("-nccl")
            context = stack.enter_context(hx.init(plan, symmetric_memory=symmetric))
            if shape.tokens <= MOST_CHECKED:
                error = largest_error(context, shape)
                assert error <= TOLERANCE, f"{name} differs from one GPU by {error:.1e}"
            return planned(context, shape), busiest_flops(shape, plan)

        yield shape.case, f"hexiseq-{name}", setup


def peers(shape: Shape) -> Iterator[Job]:
    for name, peer in PEERS.items():

        def setup(stack: ExitStack, peer: Peer = peer) -> tuple[Callable[[], object], float]:
            return peer(shape, stack), shape.forward_flops / dist.get_world_size()

        yield shape.case, name, setup


PARTS: dict[str, Callable[[], Iterator[Job]]] = {
    "alone": lambda: (job for shape in (SHORT, LONG) for job in alone(shape)),
    "layouts": lambda: (job for shape in (SHORT, LONG) for job in layouts(shape)),
    "peers": lambda: (job for shape in (SHORT, LONG) for job in peers(shape)),
    "documents": lambda: layouts(DOCUMENTS, ("heads", "ring")),
}


def run_moves(results: Results) -> None:
    """Measure the head all-to-all; GB/s are those that leave a GPU."""
    case = f"d128-t{MOVED.tokens}-gqa32x8-even"
    for impl, setup in MOVES.items():
        if results.has(case, impl, "in+out"):
            continue
        with ExitStack() as stack:
            ms = slowest_ms(setup(MOVED, stack))
        results.add(case, impl, "in+out", ms, {"gbs": leaving_bytes(MOVED) / ms / 1e6})


def run(job: Job, results: Results) -> None:
    """Measure one job; what fails on this shape is printed, and the others go on."""
    case, impl, setup = job
    if results.has(case, impl, DIRECTION):
        return
    try:
        with ExitStack() as stack:
            call, flops = setup(stack)
            ms = slowest_ms(call)
    except Unsupported as reason:
        print(f"{case} {impl}: {reason}", flush=True)
        return
    except Exception:
        if dist.get_rank() == 0:
            print(case, impl, flush=True)
            traceback.print_exc(limit=6)
        return
    finally:
        call = None  # type: ignore[assignment]
        gc.collect()
        torch.cuda.empty_cache()
    results.add(case, impl, DIRECTION, ms, {"tflops": WHOLE * flops / ms / 1e9})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=["moves", *PARTS], metavar="PART")
    parser.add_argument("--label", required=True)
    parser.add_argument("--seconds", type=float, default=450.0)
    arguments = parser.parse_args()
    began = time.monotonic()
    start_world()
    results = Results(arguments.label)
    if "moves" in arguments.parts:
        run_moves(results)
    for part in (part for part in arguments.parts if part in PARTS):
        for job in PARTS[part]():
            late = torch.tensor(time.monotonic() - began > arguments.seconds, device="cuda").int()
            dist.all_reduce(late, dist.ReduceOp.MAX)
            if late.item():
                break
            run(job, results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
