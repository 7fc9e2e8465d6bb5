"""RoPE: what the styles mean, and that attention's `rope=` equals turning q and k before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from equality import NAMES, random_qkv
from pool import TIMEOUT, Pool

from hexiseq_triton.attention import hexiseq_attention
from hexiseq_triton.context import ParallelContext, init
from hexiseq_triton.errors import InputError
from hexiseq_triton.planner import Plan, Split
from hexiseq_triton.rope import Rope, apply_rope, as_rope, rope_tables
from hexiseq_triton.shard import LocalBatch

T, H, D = 7, 3, 8


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def tables(num_turned: int = D) -> tuple[torch.Tensor, torch.Tensor]:
    angles = random(T, num_turned // 2, seed=1)
    return angles.cos(), angles.sin()


# -------------------------------------------------------------------- what it computes


def test_pairs_turn_like_complex_numbers() -> None:
    x, (cos, sin) = random(T, H, D), tables()
    turn = torch.complex(cos, sin)[:, None]
    halves = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * turn
    expected = torch.cat((halves.real, halves.imag), dim=-1)
    torch.testing.assert_close(apply_rope(x, cos, sin), expected)

    pairs = torch.complex(x[..., 0::2], x[..., 1::2]) * turn
    expected = torch.view_as_real(pairs).flatten(-2)
    torch.testing.assert_close(apply_rope(x, cos, sin, interleaved=True), expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_partial_rotary_leaves_the_other_dimensions_alone(interleaved: bool) -> None:
    x, (cos, sin) = random(T, H, D), tables(4)
    found = apply_rope(x, cos, sin, interleaved=interleaved, rotary_dim=4)
    alone = apply_rope(x[..., :4], cos, sin, interleaved=interleaved)
    assert torch.equal(found[..., :4], alone)
    assert torch.equal(found[..., 4:], x[..., 4:])


def test_tables_are_exact_at_positions_of_a_million() -> None:
    positions = torch.arange((1 << 20) - 50, 1 << 20)
    frequencies = 5e5 ** (-torch.arange(0, 128, 2, dtype=torch.float32) / 128)
    angles = positions.numpy().astype(np.longdouble)[:, None] * frequencies.numpy()
    for found, expected in zip(
        rope_tables(positions, 128, 5e5), (np.cos(angles), np.sin(angles)), strict=True
    ):
        np.testing.assert_allclose(found.numpy(), expected.astype(np.float64), rtol=0, atol=1e-7)


@pytest.mark.parametrize("rotary_dim", [None, 4])
@pytest.mark.parametrize("interleaved", [False, True])
def test_tables_of_either_width_are_the_same_rotation(
    interleaved: bool, rotary_dim: int | None
) -> None:
    x, halves = random(T, H, D), tables(rotary_dim or D)
    wide = [
        table.repeat_interleave(2, 1) if interleaved else torch.cat((table, table), 1)
        for table in halves
    ]
    style = {"interleaved": interleaved, "rotary_dim": rotary_dim}
    assert torch.equal(apply_rope(x, *halves, **style), apply_rope(x, *wide, **style))


def test_low_precision_is_computed_in_float32_and_rounded_once() -> None:
    x, (cos, sin) = random(T, H, D).bfloat16(), (table.bfloat16() for table in tables())
    exact = apply_rope(x.double(), cos, sin)
    assert torch.equal(apply_rope(x, cos, sin), exact.float().bfloat16())


@pytest.mark.parametrize(
    ("cos", "options", "message"),
    [
        (torch.ones(T, 3), {}, r"cos has shape \(7, 3\); it must be \(7, 4\) or \(7, 8\)"),
        (torch.ones(T, 2), {}, r"cos has shape \(7, 2\).* where 8 dimensions turn"),
        (torch.ones(T - 1, 4), {}, r"cos has shape \(6, 4\)"),
        (torch.ones(T, 4).int(), {}, "cos is torch.int32"),
        (torch.ones(T, 4, requires_grad=True), {}, "cos requires grad"),
        (torch.ones(T, 4), {"rotary_dim": 10}, "rotary_dim is 10; it must be even, from 2 to 8"),
        (torch.ones(T, 4), {"rotary_dim": 3}, "rotary_dim is 3"),
        ([[1.0] * 4] * T, {}, "rope's cos is a list; pass a tensor"),
    ],
)
def test_tables_that_do_not_fit_are_named(cos: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        apply_rope(random(T, H, D), cos, torch.ones(T, 4), **options)


@pytest.mark.parametrize("rope", [tables()[:1], tables()[0], 8.0])
def test_what_is_no_rope_is_named(rope: Any) -> None:
    with pytest.raises(InputError, match=rf"rope is a {type(rope).__name__}; pass \(cos, sin\)"):
        as_rope(rope)


# -------------------------------------------------------------------- inside attention

PLAN = Plan.from_splits(
    [Split((40, 21, 0), (5, 4, 5)), Split((33,), (14,)), Split((30,), (14,))], num_kv_heads=2
)
LENGTHS = (50, 1, 73)


def turned_inside_and_before(rank: int, options: dict[str, Any], style: dict[str, Any]) -> float:
    """Worker: the largest difference of o, dq, dk, dv between `rope=` and rotating before."""
    torch.use_deterministic_algorithms(True)  # fresh buffers hold NaN
    with init(PLAN, device="cpu", timeout=TIMEOUT) as context:
        tensors = random_qkv(PLAN, sum(LENGTHS), 8, seed=0)
        batch = context.shard(tensors, cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0))
        cos, sin = rope_tables(batch.position_ids, style.get("rotary_dim") or 8, theta=20.0)
        given = (cos, sin) if not style else Rope(cos, sin, **style)
        inside = attended(context, batch, options | {"rope": given})
        before = attended(context, batch, options, lambda x: apply_rope(x, cos, sin, **style))
        return max(
            float((a - b).abs().max()) if a.numel() else 0.0
            for a, b in zip(inside, before, strict=True)
        )


def attended(
    context: ParallelContext,
    batch: LocalBatch,
    options: dict[str, Any],
    rotate: Any = lambda x: x,
) -> list[torch.Tensor]:
    """Return o, dq, dk, dv of this rank."""
    q, k, v = (batch[name].detach().clone().requires_grad_() for name in "qkv")
    o = hexiseq_attention(rotate(q), rotate(k), v, context, batch.layout, **options)
    grads = torch.autograd.grad(o, (q, k, v), batch["do"])
    assert len(grads) + 1 == len(NAMES)
    return [o.detach(), *grads]


STYLES: dict[str, dict[str, Any]] = {
    "a pair of tables": {},
    "half-split, partial": {"rotary_dim": 4},
    "interleaved": {"interleaved": True},
    "interleaved, partial": {"interleaved": True, "rotary_dim": 6},
}


@pytest.mark.parametrize("name", STYLES)
def test_rope_inside_attention_equals_rotating_before(pool: Pool, name: str) -> None:
    assert max(pool.run(turned_inside_and_before, {"causal": True}, STYLES[name])) <= 1e-12


def with_other_ropes(rank: int) -> None:
    """Worker: rank 1 turns other pairs than the others."""
    with init(PLAN, device="cpu", timeout=TIMEOUT) as context:
        tensors = random_qkv(PLAN, sum(LENGTHS), 8, seed=0)
        batch = context.shard(tensors, cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0))
        rope = Rope(*rope_tables(batch.position_ids, 8), interleaved=rank == 1)
        hexiseq_attention(batch["q"], batch["k"], batch["v"], context, batch.layout, rope=rope)


def test_ranks_with_different_ropes_raise_the_same_error(pool: Pool) -> None:
    found = {(outcome.kind, outcome.error) for outcome in pool.outcomes(with_other_ropes)}
    assert len(found) == 1, found
    kind, text = found.pop()
    assert kind == "InputError"
    assert "ranks call attention differently" in text
    assert "rope interleaved" in text
