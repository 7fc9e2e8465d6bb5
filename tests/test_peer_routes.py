"""The exchange between groups by shared memory equals dense attention, and its messages' bits."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import equality
import pytest
import torch
from drawn_plans import Case, cases
from equality import dense, largest_errors, planned, random_qkv
from hypothesis import HealthCheck, given, seed, settings
from pool import TIMEOUT, Pool
from shared_files import share_files
from test_oracle import FIXED, MUTATED, SEED, TOLERANCE

from hexiseq_triton.attention import hexiseq_attention
from hexiseq_triton.context import ParallelContext, init
from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.peer_routes import PeerRoutes
from hexiseq_triton.planner import ExchangePlan, Plan, Split
from hexiseq_triton.profiling.fetching import keys_channel
from hexiseq_triton.segments import CAUSAL


@contextmanager
def opened(folder: Path, *arguments: Any, **options: Any) -> Iterator[ParallelContext]:
    """Open a context whose keys go through files in `folder`."""
    with init(*arguments, **options) as context:
        share_files(context, folder)
        yield context


def errors_by_files(rank: int, folder: Path, *arguments: Any) -> tuple[dict[str, float], int]:
    """Worker: the errors of `largest_errors`, and how often keys went through files."""
    calls = 0
    original = PeerRoutes.arrivals

    def counted(self: PeerRoutes, *given: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(self, *given)

    def start(*given: Any, **options: Any) -> Any:
        return opened(folder, *given, **options)

    with (
        mock.patch.object(equality, "init", start),
        mock.patch.object(PeerRoutes, "arrivals", counted),
    ):
        return largest_errors(rank, *arguments), calls


def errors_of(pool: Pool, case: Case) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        found = pool.run(
            errors_by_files, Path(folder), case.plan, case.lengths, case.head_dim, case.options,
            case.seed,
        )  # fmt: skip
    for rank, (_, calls) in enumerate(found):
        replica = case.plan.replica_of(rank)
        exchanges = replica is not None and len(case.plan.replicas[replica].groups) > 1
        assert calls == (2 if exchanges else 0)
    merged: Counter[str] = Counter()
    for errors, _ in found:
        merged |= Counter(errors)
    return merged


def test_every_drawn_plan_equals_dense_attention(pool: Pool) -> None:
    def check(case: Case) -> None:
        errors = errors_of(pool, case)
        assert max(errors.values(), default=0.0) <= TOLERANCE, f"HEXISEQ_TEST_SEED={SEED}: {errors}"

    for mixed in (False, True):
        settings(
            max_examples=30, deadline=None, database=None, suppress_health_check=list(HealthCheck)
        )(seed(SEED)(given(cases(mixed))(check)))()


@pytest.mark.parametrize("name", FIXED)
def test_chosen_plan_equals_dense_attention(pool: Pool, name: str) -> None:
    assert max(errors_of(pool, FIXED[name]).values(), default=0.0) <= TOLERANCE


def many_calls(rank: int, folder: Path, case: Case, wire: torch.dtype | None) -> float:
    """Worker: layers one after the other on other batches, first all forward and then back; return
    the largest difference to messages. Buffers are written again in every call."""
    torch.use_deterministic_algorithms(True)
    differences = [0.0]
    with init(case.plan, device="cpu", timeout=TIMEOUT) as context:
        share_files(context, folder)
        routes = context.peer_routes
        for seed in range(4):
            (lengths,) = case.lengths
            tensors = random_qkv(case.plan, sum(lengths), case.head_dim, seed)
            lengths = lengths[seed % 3 :] + lengths[: seed % 3]
            both = []
            for context.peer_routes in (routes, None):
                both.append(planned(context, tensors, lengths, causal=True, reduce_dtype=wire))
            differences += [equality.largest(a - b) for a, b in zip(*both, strict=True)]
            if wire is None and context.replica is not None:
                for a, b in zip(both[0], dense(tensors, lengths, causal=True), strict=True):
                    assert equality.largest(a - b) <= TOLERANCE
        context.peer_routes = routes
    return max(differences)


@pytest.mark.parametrize("wire", [None, torch.float32], ids=["float64", "float32 partials"])
@pytest.mark.parametrize("window", [1, 2])
def test_calls_one_after_the_other_have_the_bits_of_messages(
    pool: Pool, wire: torch.dtype | None, window: int, tmp_path: Path
) -> None:
    exchange = ExchangePlan(chunk_tokens=16, window=window)
    case = replace(MUTATED, plan=replace(MUTATED.plan, exchange=exchange))
    assert pool.run(many_calls, tmp_path, case, wire) == [0.0] * 5


def layers_in_a_row(rank: int, folder: Path, case: Case) -> float:
    """Worker: forwards of other keys that nothing but their exchange holds together; return the
    largest difference to messages."""
    (lengths,) = case.lengths
    with init(case.plan, device="cpu", timeout=TIMEOUT) as context:
        share_files(context, folder)
        routes = context.peer_routes
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        layers = []
        for seed in range(8):
            tensors = random_qkv(case.plan, sum(lengths), case.head_dim, seed)
            layers.append(context.shard(tensors, cu_seqlens=bounds))
        both: list[list[torch.Tensor]] = []
        for context.peer_routes in (routes, None):
            outputs = [
                hexiseq_attention(batch["q"], batch["k"], batch["v"], context, layers[0].layout)
                for batch in layers
            ]
            both.append(outputs)
        context.peer_routes = routes
        return max(equality.largest(a - b) for a, b in zip(*both, strict=True))


def test_keys_stand_until_all_have_taken_them(pool: Pool, tmp_path: Path) -> None:
    exchange = ExchangePlan(chunk_tokens=8, window=1)
    case = replace(MUTATED, plan=replace(MUTATED.plan, exchange=exchange, causal=False))
    assert pool.run(layers_in_a_row, tmp_path, case) == [0.0] * 5


def fetched_from_neighbours(rank: int, folder: Path, case: Case) -> list[float]:
    """Worker: write the own rank into the shared memory, and fetch the neighbours'."""
    with init(case.plan, device="cpu", timeout=TIMEOUT) as context:
        assert keys_channel(context, 1) is context.routes
        share_files(context, folder)
        if context.peer_routes is None:
            return []
        channel = keys_channel(context, 40)
        context.peer_routes.memory.local(0, (10,), torch.float32).fill_(rank)
        context.gather_in_replica("written", "")
        ranks = context.replica_ranks
        neighbours = [ranks[(ranks.index(rank) + step) % len(ranks)] for step in (1, -1)]
        out, into = torch.zeros(2, 10)
        found = []
        for after, before in (neighbours, neighbours[::-1]):
            channel.start([(after, out)], [(before, into)], "a test").wait()
            found += into.unique().tolist()
        assert found == [neighbours[1], neighbours[0]]
        return found


def test_measured_messages_come_from_the_peer(pool: Pool, tmp_path: Path) -> None:
    assert [len(found) for found in pool.run(fetched_from_neighbours, tmp_path, MUTATED)] == [
        2, 2, 2, 2, 0,
    ]  # fmt: skip


def said_paths(rank: int) -> list[str]:
    """Worker: how transfers travel under some plans, by messages."""
    one = Split((4,), (2,))
    plans = (
        [[Split((4, 4), (1, 1))], [one, one], [Split((8,), (2,))]],
        [[Split((4, 4), (1, 1)), one]],
    )
    found = []
    for replicas in plans:
        plan = Plan.from_splits(*replicas, world_size=5)
        with init(plan, device="cpu", timeout=TIMEOUT) as context:
            found.append(context.paths)
    return found


def test_reports_name_what_travels(pool: Pool) -> None:
    heads, keys = "head all-to-alls by gloo", "keys by gloo"
    both, nothing = f"{heads}, {keys}", "nothing travels"
    first, second = zip(*pool.run(said_paths), strict=True)
    assert first == (heads, heads, keys, keys, nothing)
    assert second == (both, both, keys, nothing, nothing)


# -------------------------------------------------------------------- places


@settings(max_examples=60)
@given(cases(mixed=True))
def test_all_ranks_know_the_same_places_which_do_not_overlap(case: Case) -> None:
    (lengths,) = case.lengths
    shares = case.plan.replicas[0].shares
    layouts = {share.rank: BatchLayout(case.plan, share.rank, lengths) for share in shares}
    first, *others = (layout.places(CAUSAL) for layout in layouts.values())
    assert all(places == first for places in others)
    for regions, most in ((first.keys, first.key_lines), (first.partials, first.partial_lines)):
        for each in regions.values():
            ends = [(region.start, region.stop) for region in each.values()]
            flat = [edge for bounds in sorted(ends) for edge in bounds]
            assert flat == sorted(flat)
            assert max(flat, default=0) <= most
    for rank, layout in layouts.items():
        for number, round_ in enumerate(layout.exchange(CAUSAL).rounds):
            for item, rows in round_.arrivals:
                assert first.arrived[number, item] == rows
                assert first.keys[item.sender][item.kv_heads].rows >= max(b for _, b in item.rows)
                assert first.partials[rank][item.kv_heads].rows >= rows[1]
