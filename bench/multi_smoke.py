"""Where a ring over all GPUs stops, if it does: launch by launch, in under a minute.

    torchrun --nproc-per-node 2 bench/multi_smoke.py [--tokens 131072] [--seconds 50]

Every rank says when a launch was queued, which counts compiling and loading, and when it was done.
When the time is up, all threads show where they are. The stage and the last line tell the rest:

    alone, step by step      no rank waits for another: a launch that is not queued compiles, one
                             that is not done hangs in its kernel
    together, step by step   keys and gradients move; the device is waited for after each launch, so
                             what hangs is a transfer
    together                 the same, queued without waiting: what hangs only here is a matter of
                             streams, marks and what the host waits for
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from unittest.mock import patch

import torch

import hexiseq_triton as hx
from hexiseq_triton import ring
from hexiseq_triton.attention import hexiseq_attention
from hexiseq_triton.channel import Channel, Message, Pending
from hexiseq_triton.context import ParallelContext
from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.planner import ExchangePlan, Plan, Split

Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
CALLS = 3
"""Forward and backward in a row, in the last stage; one in the others."""


class Still(Channel):
    """Moves nothing: attention runs on whatever stands in the pools."""

    def start(self, sends: Sequence[Message], receives: Sequence[Message], what: str) -> Pending:
        return Pending((), (), what)


class Log:
    """Lines with the seconds since the start."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        seconds = time.monotonic() - self._began
        print(f"[{seconds:5.1f}] {os.environ['RANK']}: {text}\n", end="", flush=True)

    def told(self, launch: Callable[..., None], *, wait: bool) -> Callable[..., None]:
        """Return a launch that says which it is and how far it got."""

        def told(*tensors: object, **options: object) -> None:
            self.say(f"    {_name(options)} ...")
            launch(*tensors, **options)
            self.say(f"    {_name(options)} queued")
            if wait:
                _synchronize()
                self.say(f"    {_name(options)} done")

        return told


def _name(options: dict[str, object]) -> str:
    if "accumulate" in options:
        return "backward that " + ("adds" if options["accumulate"] else "writes")
    first, last = options["first"], options["out"] is not None
    return f"forward ({'first' if first else 'carried'}, {'last' if last else 'more to come'})"


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def plan_of(tokens: int, world: int) -> Plan:
    """Return an even ring with several rounds, so that every kind of launch is there."""
    each = tokens // world
    exchange = ExchangePlan(chunk_tokens=max(1, each // 4), window=2)
    splits = [Split((each,), (Q_HEADS,))] * world
    return Plan.from_splits(splits, num_kv_heads=KV_HEADS, exchange=exchange)


def call_of(context: ParallelContext, tokens: int, log: Log) -> Callable[[], None]:
    """Return forward and backward of this rank, which say when they are queued."""
    layout = BatchLayout(context.plan, context.rank, (tokens,))
    q, k, v = (
        torch.randn(layout.num_tokens, heads, HEAD_DIM, device=context.device, dtype=torch.bfloat16)
        .requires_grad_()
        for heads in (Q_HEADS, KV_HEADS, KV_HEADS)
    )  # fmt: skip

    def call() -> None:
        out = hexiseq_attention(q, k, v, context, layout, causal=True)
        log.say("  forward queued")
        out.backward(torch.ones_like(out))
        log.say("  backward queued")

    return call


def stage(
    name: str, context: ParallelContext, call: Callable[[], None], log: Log, *, calls: int = 1
) -> None:
    """Run one stage to its end."""
    log.say(name)
    wait = name.endswith("step by step")
    with ExitStack() as stack:
        for launch in ("attention_forward", "attention_backward"):
            told = log.told(getattr(ring, launch), wait=wait)
            stack.enter_context(patch.object(ring, launch, told))
        if name.startswith("alone"):
            still = Still(None, context.rank, {}, context.device)
            stack.enter_context(patch.object(context, "routes", still))
            stack.enter_context(patch.object(context, "peer_routes", None))
        for _ in range(calls):
            call()
    _synchronize()
    log.say(f"{name}: done")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument(
        "--seconds", type=float, default=50.0, help="then say where all threads are"
    )
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.seconds, exit=True)
    log = Log()
    log.say("start")
    plan = plan_of(options.tokens, int(os.environ["WORLD_SIZE"]))
    with hx.init(plan, timeout=timedelta(seconds=2 * options.seconds)) as context:
        log.say("communicators are there")
        call = call_of(context, options.tokens, log)
        stage("alone, step by step", context, call, log)
        stage("together, step by step", context, call, log)
        stage("together", context, call, log, calls=CALLS)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
