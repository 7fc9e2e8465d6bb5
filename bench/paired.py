"""Ours against a peer, side by side: ratios of medians with their 95% intervals.

    python bench/paired.py [WORD ...] [--peers fa4 cudnn] [--rounds 15] [--seconds 5] [--beside 8]

A round times every implementation once, in shuffled order, by calls back to back for its share of
`seconds`: a card at its power limit slows down and recovers within seconds, and so does it for all.
Round i of ours and of a peer are a pair. A ratio is the peer's median time to ours, above 1 where
ours is faster; its interval comes from drawing the pairs anew 2,000 times. Lines go to
bench/results/paired.jsonl. WORDs choose the cases whose names contain all of them:

    forward, backward   one document; documents of long-tail lengths; 132 or 124 multiprocessors
    carried             64K queries see 64K keys: in one launch (the peer), in several, or in
                        launches of three chunks each

With --beside another kernel holds as many multiprocessors all the while.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from attention_impls import DEVICE, IMPLS, Problem, Unsupported, hexiseq
from held import held
from measure import event_ms, keep, long_tail

from hexiseq_triton.kernels import AttentionOptions, HeadMap
from hexiseq_triton.kernels.forward import attention_forward
from hexiseq_triton.kernels.options import PlacedSegment
from hexiseq_triton.segments import FULL, Segment

OURS = "hexiseq"
SM_MARGIN = 8
RESAMPLES = 2000
HOST_MS = 1.0
"""No call takes the host longer; calls that take the card less are all issued while it waits."""
SHORT_REPEATS = 20
Call = Callable[[], object]


class Case(NamedTuple):
    """One comparison: its name, direction and FLOPs, and what builds the calls by name."""

    name: str
    direction: str
    flops: float
    build: Callable[[Sequence[str]], dict[str, Call]]


def attention_cases() -> Iterator[Case]:
    """Yield causal attention in both directions."""
    documents = long_tail(65536)
    problems = {
        "d128-s4096-gqa32x8": Problem((4096,), 128),
        "d128-s16384-gqa32x8": Problem((16384,), 128),
        "d128-s65536-gqa32x8": Problem((65536,), 128),
        "d128-s131072-gqa32x8": Problem((131072,), 128),
        "d128-s16384-mha32": Problem((16384,), 128, 32, 32),
        f"d128-t65536-docs{len(documents)}-gqa32x8": Problem(documents, 128),
        "d64-s4096-gqa32x8": Problem((4096,), 64),
        "d64-s16384-gqa32x8": Problem((16384,), 64),
        "d64-s65536-gqa32x8": Problem((65536,), 64),
        f"d64-t65536-docs{len(documents)}-gqa32x8": Problem(documents, 64),
        "d256-s16384-gqa32x8": Problem((16384,), 256),
    }
    for direction in ("forward", "backward"):
        for name, problem in problems.items():
            yield _attention(f"{direction}-{name}-sms132", direction, problem, 0)
            yield _attention(f"{direction}-{name}-sms124", direction, problem, SM_MARGIN)


def _attention(name: str, direction: str, problem: Problem, sm_margin: int) -> Case:
    def build(peers: Sequence[str]) -> dict[str, Call]:
        chosen = {OURS: partial(hexiseq, sm_margin=sm_margin)} | {p: IMPLS[p] for p in peers}
        calls = {}
        for impl, make in chosen.items():
            try:
                calls[impl] = getattr(make(problem), direction)
            except Unsupported as reason:
                print(f"{name}: {impl} left out: {reason}", flush=True)
        return calls

    flops = problem.forward_flops if direction == "forward" else problem.backward_flops
    return Case(name, direction, flops, build)


def carried_cases() -> Iterator[Case]:
    """Yield the forward over chunks of keys; the state passes through float32 between launches."""
    problem = Problem((65536,), 128)
    for num_chunks, per_launch in ((8, 1), (3, 1), (9, 3), (3, 3)):
        name = f"carried-d128-q65536-chunks{num_chunks}-per-launch{per_launch}"

        def build(_: Sequence[str], n: int = num_chunks, each: int = per_launch) -> dict[str, Call]:
            return {OURS: carried(problem, n, each), "one launch": carried(problem, 1, 1)}

        yield Case(name, "forward", 2 * problem.forward_flops, build)


def carried(problem: Problem, num_chunks: int, per_launch: int) -> Call:
    """Return a forward in which every query sees all keys, `per_launch` chunks at a time."""
    (tokens,) = problem.lengths
    q, k, v, _ = problem.inputs
    o, out = torch.empty(q.shape, device=DEVICE), torch.empty_like(q)
    lse = torch.empty(q.shape[1], tokens, device=DEVICE)
    edges = [tokens * i // num_chunks for i in range(num_chunks + 1)]
    chunks = [PlacedSegment(0, a, b, a) for a, b in pairwise(edges)]
    launches = [chunks[i : i + per_launch] for i in range(0, num_chunks, per_launch)]
    call = (HeadMap(0, problem.q_heads // problem.kv_heads), AttentionOptions(FULL, 128**-0.5))

    def forward() -> None:
        for i, seen in enumerate(launches):
            last = i == len(launches) - 1
            attention_forward(
                q, k, v, o, lse, (Segment(0, 0, tokens),), seen, *call,
                first=i == 0, out=out if last else None,
            )  # fmt: skip

    return forward


def interval(ours: Sequence[float], peer: Sequence[float]) -> tuple[float, float, float]:
    """Return the ratio of the medians of paired times, peer to ours, and its 95% interval."""
    pairs = np.array([ours, peer])
    draws = np.random.default_rng(0).integers(0, pairs.shape[1], (RESAMPLES, pairs.shape[1]))
    medians = np.median(pairs[:, draws], axis=2)
    low, high = np.percentile(medians[1] / medians[0], [2.5, 97.5])
    middle = np.median(pairs[1]) / np.median(pairs[0])
    return float(middle), float(low), float(high)


def rounds_of(calls: dict[str, Call], num_rounds: int, seconds: float) -> dict[str, list[float]]:
    """Return the milliseconds of one call of each implementation, in every round."""
    repeats = {}
    for name, call in calls.items():
        once = min(event_ms(call) for _ in range(3))
        wanted = round(seconds * 1000 / num_rounds / once)
        repeats[name] = max(1, wanted if once > HOST_MS else min(wanted, SHORT_REPEATS))
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    draw = random.Random(0)
    for _ in range(num_rounds):
        draw.shuffle(order)
        for name in order:
            ms = event_ms(partial(_repeat, calls[name], repeats[name]), SHORT_REPEATS * HOST_MS)
            times[name].append(ms / repeats[name])
    return times


def _repeat(call: Call, times: int) -> None:
    for _ in range(times):
        call()


def compare(
    case: Case, peers: Sequence[str], num_rounds: int, seconds: float, beside: int = 0
) -> None:
    """Time one case, `beside` multiprocessors held by another kernel; keep a line for each peer."""
    calls = case.build(peers)
    if beside:
        for call in calls.values():  # else `rounds_of` is the first to run them
            call()
    with held(beside):
        times = rounds_of(calls, num_rounds, seconds)
    name = f"{case.name}-beside{beside}" if beside else case.name
    ours = float(np.median(times[OURS]))
    for peer, peer_times in times.items():
        if peer == OURS:
            continue
        ratio, low, high = interval(times[OURS], peer_times)
        theirs = float(np.median(peer_times))
        keep(
            "paired", case=name, direction=case.direction, peer=peer, rounds=num_rounds,
            median_ms=round(ours, 4), tflops=round(case.flops / ours / 1e9, 1),
            peer_ms=round(theirs, 4), peer_tflops=round(case.flops / theirs / 1e9, 1),
            ratio=round(ratio, 4), low=round(low, 4), high=round(high, 4),
        )  # fmt: skip
        rates = f"{case.flops / ours / 1e9:6.0f} {peer} {case.flops / theirs / 1e9:6.0f} TFLOP/s"
        print(f"{name:48} {rates}  {ratio:.3f} ({low:.3f} to {high:.3f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="a case runs if its name contains all of them")
    parser.add_argument("--peers", nargs="+", default=["fa4", "cudnn"], choices=list(IMPLS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each implementation")
    parser.add_argument("--beside", type=int, default=0, help="multiprocessors that are held")
    args = parser.parse_args()
    for case in (*attention_cases(), *carried_cases()):
        if all(word in case.name for word in args.words):
            compare(case, args.peers, args.rounds, args.seconds, args.beside)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
