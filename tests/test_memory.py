"""The memory model: what is counted, what grows with what, and the caps that follow from it."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from drawn_problems import drawn_layout, drawn_problem, problem_for
from invented import MODEL, cluster_of, one_each, one_replica

from hexiseq_triton.group_slots import members_of
from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.llama import Llama, LlamaConfig
from hexiseq_triton.peer_slots import regions
from hexiseq_triton.planner.cost import evaluate
from hexiseq_triton.planner.memory import (
    ATTENTION,
    BUFFERED,
    FIXED,
    MLP,
    PEER_GRANULE,
    PER_Q_HEAD,
    PER_TOKEN,
    memory_model,
    peak_bytes,
)
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.plans import ExchangePlan, Plan, Split
from hexiseq_triton.planner.problem import Group
from hexiseq_triton.planner.rows import Rows
from hexiseq_triton.rope import rope_tables
from hexiseq_triton.segments import CAUSAL


def test_states_are_sharded_evenly_and_limits_are_95_percent() -> None:
    model = ModelSpec.load("7b")
    two, four = (problem_for(cluster_of(n), model, seq_len=64) for n in (2, 4))

    saved = memory_model(two).idle - memory_model(four).idle
    # and of a layer in bf16, which each rank sends to the others
    parameters = 16 * model.parameters + 1.05 * 2 * model.parameters_per_layer
    assert saved == pytest.approx(parameters * (1 / 2 - 1 / 4))
    assert two.rates.memory_limit.tolist() == [9.5e9, 9.5e9]


def test_full_recompute_keeps_one_layers_input_for_each_token() -> None:
    shallow, deep = (
        memory_model(problem_for(cluster_of(1), replace(MODEL, layers=n), seq_len=4096))
        for n in (1, 5)
    )
    more = deep.moments - shallow.moments
    assert more[MLP, PER_TOKEN] == pytest.approx(1.05 * 4 * 2 * MODEL.hidden)
    assert (more[:, PER_Q_HEAD:BUFFERED] == 0).all()


def test_without_recompute_every_layer_keeps_its_activations_and_heads() -> None:
    problem = problem_for(cluster_of(1), "7b", seq_len=4096)
    kept = replace(problem, workload=replace(problem.workload, recompute="none"))

    with_all, with_one = memory_model(kept).moments, memory_model(problem).moments
    assert with_all[MLP, PER_TOKEN] > 5 * with_one[MLP, PER_TOKEN]
    assert with_all[MLP, PER_Q_HEAD] > 5 * with_one[MLP, PER_Q_HEAD]
    assert (with_all[:, FIXED] == with_one[:, FIXED]).all()


def test_kept_activations_are_those_that_autograd_keeps() -> None:
    shape = replace(MODEL, hidden=128, heads=8, kv_heads=2, head_dim=16, ffn=320, layers=2)
    layer = Llama(LlamaConfig.from_spec(shape)).to(torch.bfloat16).blocks[0]
    tokens, kept = 50, {}

    def keep(saved: torch.Tensor) -> torch.Tensor:
        if saved.dtype is torch.bfloat16 and saved.shape[0] == tokens:
            kept[saved.untyped_storage().data_ptr()] = saved  # and so stays alive
        return saved

    x = torch.randn(tokens, 128, dtype=torch.bfloat16, requires_grad=True)
    rope = rope_tables(torch.arange(tokens), 16, 10000.0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        layer(x, rope, _KeepsQKV.apply)
    num_bytes = sum(saved.untyped_storage().nbytes() for saved in kept.values()) / tokens
    num_bytes += 2 * 2 * 128  # the norms' inputs, which the CPU's norm keeps as float32 copies

    one, two = (
        memory_model(problem_for(cluster_of(1), spec, seq_len=64, recompute="none"))
        for spec in (replace(shape, layers=1), shape)
    )
    predicted = (two.whole_tokens(shape) - one.whole_tokens(shape))[MLP]
    assert predicted / 1.05 == pytest.approx(num_bytes + 8 * 4)  # and lse


class _KeepsQKV(torch.autograd.Function):
    """Keeps what attention keeps: q, k, v and the output."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.randn_like(q)
        ctx.save_for_backward(q, k, v, out)
        return out


def test_only_groups_that_exchange_need_buffers() -> None:
    exchange = ExchangePlan(chunk_tokens=100, window=2)
    problem = problem_for(cluster_of(2), MODEL, exchange, seq_len=1000)
    together = one_replica(Group((0, 1), (500, 500), (2, 2)))
    apart = one_each(500, 500)

    memory = memory_model(problem)
    # two rounds of three chunks of 100 rows, in, and out to two groups; K and V in bf16 and
    # gradients in float32
    assert memory.buffer_per_kv_head == pytest.approx(1.05 * 2 * 3 * 100 * 3 * 2 * 16 * (2 + 4))
    rows = Rows.of(problem, apart)
    assert memory.beside(replace(rows, replica=np.arange(2))).tolist() == [0.0, 0.0]
    lent = 500 * 2 * memory.block_per_kv_head + 2 * memory.peer_fixed
    assert memory.beside(rows).tolist() == pytest.approx([memory.communicator + lent] * 2)
    added = memory.of_moments(rows) - memory.of_moments(replace(rows, replica=np.arange(2)))
    assert added[ATTENTION].tolist() == pytest.approx([2 * memory.buffer_per_kv_head] * 2)
    assert added.sum() == pytest.approx(added[ATTENTION].sum())
    sent = replace(Rows.of(problem, together), node=np.arange(2))
    assert memory.beside(sent).tolist() == [memory.communicator] * 2


def test_the_fullest_moment_counts() -> None:
    seq_len = 4_000_000
    problem = problem_for(cluster_of(2), replace(MODEL, layers=3, ffn=1024), seq_len=seq_len)
    memory = memory_model(problem)
    rows = Rows.of(problem, one_replica(Group((0, 1), (seq_len - 1, 1), (1, 3))))
    of_mlp = memory.moments[MLP] @ [1, seq_len - 1, seq_len, seq_len, 0]
    of_attention = memory.moments[ATTENTION] @ [1, 1, 3 * seq_len, 2 * seq_len, 0]
    beside = memory.beside(rows)

    assert memory.rank_bytes(rows)[0] == pytest.approx(of_mlp + beside[0])
    assert memory.rank_bytes(rows)[1] == pytest.approx(of_attention + beside[1])


@pytest.mark.parametrize("seed", range(20))
def test_buffers_are_no_smaller_than_the_runtimes_pools(seed: int) -> None:
    rng = Random(seed)
    exchange = ExchangePlan(chunk_tokens=100, window=rng.choice([1, 2, 3]))
    heads = rng.choices([(6,), (2, 4), (3, 3), (1, 2, 3)], k=rng.randint(2, 5))
    splits = [Split((16 * rng.randint(10, 100),) * len(group), group) for group in heads]
    plan = Plan.from_splits(splits, exchange=exchange)
    shape = replace(MODEL, heads=6, kv_heads=6, head_dim=16)
    problem = problem_for(cluster_of(plan.world_size), shape, exchange, seq_len=plan.seq_len)
    per_kv_head = memory_model(problem).buffer_per_kv_head

    for share in plan.shares:
        pools = BatchLayout(plan, share.rank, [plan.seq_len]).exchange(CAUSAL)
        num_bytes = 0
        for rows, each in ((pools.arrival_rows, 2 + 4), (pools.return_rows, 4)):
            num_bytes += sum(n * (b - a) * 2 * 16 * each for (a, b), n in rows.items())
        assert 0 < num_bytes <= share.num_kv_heads * per_kv_head


@pytest.mark.parametrize("seed", range(20))
def test_buffers_of_the_all_to_all_are_no_smaller_than_the_runtimes(seed: int) -> None:
    rng = Random(seed)
    heads = rng.choice([(6,), (2, 4), (3, 3), (1, 2, 3), (5, 0, 1)])
    tokens = tuple(16 * rng.randint(1000, 9000) for _ in heads)
    plan = Plan.from_splits([Split(tokens, heads)], num_kv_heads=rng.choice([1, 2, 3, 6]))
    shape = replace(MODEL, heads=6, kv_heads=plan.num_kv_heads, head_dim=64)
    problem = problem_for(cluster_of(plan.world_size), shape, seq_len=plan.seq_len)
    memory = memory_model(problem)
    runtime = regions(members_of(BatchLayout(plan, 0, [plan.seq_len])), 2 * 64, 4 * 64)
    num_bytes = -(-runtime.num_bytes // PEER_GRANULE) * PEER_GRANULE

    layout = one_replica(Group(tuple(range(len(heads))), tokens, heads))
    rows = Rows.of(problem, layout)
    sent = replace(rows, node=np.arange(len(heads)))
    added = memory.beside(rows) - memory.beside(sent)
    assert (added == added[0]).all()
    if len(heads) == 1:
        assert added[0] == 0
    else:
        assert num_bytes <= added[0] <= num_bytes + PEER_GRANULE


def test_gathered_keys_take_the_whole_stream_and_rings_a_few_blocks() -> None:
    problem = problem_for(cluster_of(4), MODEL, seq_len=4000)
    rows = Rows.of(problem, one_each(1000, 1000, 1000, 1000))
    memory = memory_model(problem)
    without = memory.of_moments(replace(rows, replica=np.arange(4)))

    for exchange, tokens in (("all_gather", 4000), ("rotation", 2000), ("double_ring", 4000)):
        held = memory.of_moments(rows, exchange) - without  # type: ignore[arg-type]
        assert held[ATTENTION].tolist() == pytest.approx(
            [2 * tokens * memory.block_per_kv_head] * 4
        )


def test_idle_ranks_hold_their_shard() -> None:
    problem = problem_for(cluster_of(3), MODEL, seq_len=1_000_000)
    used = peak_bytes(problem, Rows.of(problem, one_each(600_000, 400_000)))

    assert used[2] == np.ceil(memory_model(problem).idle)
    assert used[2] < used[1] < used[0]


@pytest.mark.parametrize("seed", range(10))
def test_more_tokens_or_heads_never_need_less(seed: int) -> None:
    rng = Random(seed)
    problem = drawn_problem(rng)
    rows = Rows.of(problem, drawn_layout(rng, problem))
    memory = memory_model(problem)
    used = memory.rank_bytes(rows)

    of_mlp = memory.of_moments(replace(rows, tokens=rows.tokens + 1))[MLP]
    assert (of_mlp > memory.of_moments(rows)[MLP]).all()
    for more in (
        replace(rows, tokens=rows.tokens + 1),
        replace(rows, group_tokens=rows.group_tokens + 1),
    ):
        assert (memory.rank_bytes(more) >= used).all()
    assert (memory.rank_bytes(replace(rows, q_heads=rows.q_heads + 1)) >= used).all()


def test_the_fullest_rank_decides_whether_a_layout_fits() -> None:
    problem = problem_for(cluster_of(2), "3b", seq_len=1 << 20)
    cost = evaluate(problem, one_replica(Group((0, 1), (1 << 19, 1 << 19), (20, 12))))

    assert not cost.fits
    assert cost.fullest_rank == 0
