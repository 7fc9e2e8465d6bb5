"""Megatron's core attention under uneven plans equals dense attention in one process."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field, fields
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from equality import NAMES, dense, random_qkv
from pool import TIMEOUT, Pool

from hexiseq_triton.context import ParallelContext, init
from hexiseq_triton.errors import HexiSeqError
from hexiseq_triton.integrations.megatron import DotProductAttention, _turns, carry
from hexiseq_triton.planner import Plan, Split
from hexiseq_triton.rope import apply_rope, rope_tables

PLAN = Plan.from_splits(
    [Split((40, 0, 13), (5, 2, 1)), Split((43,), (8,))], num_kv_heads=2, world_size=5
)
"""Rank 1 has heads and no token; rank 4 is idle."""
LENGTHS = [31, 1, 40, 0, 24]
HEAD_DIM = 16
WINDOW = (7, 0)

AttnMaskType = Enum("AttnMaskType", "padding causal no_mask padding_causal arbitrary")


@dataclass
class PackedSeqParams:
    """Megatron's, as far as attention meets it."""

    qkv_format: str | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_kv: torch.Tensor | None = None
    cu_seqlens_q_padded: torch.Tensor | None = None
    cu_seqlens_kv_padded: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    local_cp_size: int | None = None
    cp_group: Any = field(default=None)


def config(**changes: Any) -> SimpleNamespace:
    """Return what attention reads of a TransformerConfig, with Megatron's defaults."""
    defaults = {
        "attention_dropout": 0.0,
        "window_size": WINDOW,
        "window_attn_skip_freq": 2,
        "no_rope_freq": 3,
        "softmax_type": "vanilla",
        "context_parallel_size": 1,
        "tensor_model_parallel_size": 1,
        "deterministic_mode": False,
    }
    return SimpleNamespace(**(defaults | changes))


def shard(context: ParallelContext, tensors: dict[str, torch.Tensor]) -> Any:
    return context.shard(tensors, cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0))


def attended(
    rank: int, qkv_format: str, mask_type: str, layer_number: int, turns: bool
) -> list[torch.Tensor]:
    """Worker: return o, dq, dk, dv of the whole batch, from calls in Megatron's shapes."""
    with init(PLAN, device="cpu", timeout=TIMEOUT) as context:
        attention = DotProductAttention(
            config(), layer_number, AttnMaskType.padding, "self", context=context
        )
        batch = shard(context, random_qkv(PLAN, sum(LENGTHS), HEAD_DIM, seed=0))
        rope = rope_tables(batch.position_ids, HEAD_DIM) if turns else None
        packed = carry(PackedSeqParams(qkv_format=qkv_format), batch, rope=rope)
        leaves = [batch[name].clone() for name in "qkv"]
        do = batch["do"].flatten(-2)
        if qkv_format == "sbhd":
            leaves, do = [x[:, None] for x in leaves], do[:, None]
        leaves = [x.requires_grad_() for x in leaves]
        out = attention(
            *leaves,
            None,
            attn_mask_type=AttnMaskType[mask_type],
            attention_bias=None,
            packed_seq_params=packed,
        )
        assert out.shape == do.shape
        grads = torch.autograd.grad(out, leaves, do)
        rows = (x.detach().flatten(1).unflatten(1, (-1, HEAD_DIM)) for x in (out, *grads))
        return [context.unshard(x, batch.layout) for x in rows]


def expected(causal: bool, window_size: tuple[int, int], turns: bool) -> list[torch.Tensor]:
    tensors = random_qkv(PLAN, sum(LENGTHS), HEAD_DIM, seed=0)
    if not turns:
        return dense(tensors, LENGTHS, causal=causal, window_size=window_size)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    leaves = [tensors[name].requires_grad_() for name in "qk"]
    turned = [apply_rope(x, *rope_tables(positions, HEAD_DIM)) for x in leaves]
    q, k = (x.detach() for x in turned)
    kept = tensors | {"q": q, "k": k}
    o, dq, dk, dv = dense(kept, LENGTHS, causal=causal, window_size=window_size)
    return [o, *torch.autograd.grad(turned, leaves, [dq, dk]), dv]


CASES = [
    ("thd", "padding_causal", 1, True, WINDOW, True),
    ("sbhd", "causal", 2, False, (-1, -1), True),
    ("sbhd", "no_mask", 2, False, (-1, -1), False),
    ("thd", "padding_causal", 3, True, WINDOW, True),
]
"""Format, mask type, layer, whether RoPE is carried; the window of this layer, whether causal."""


@pytest.mark.parametrize(("qkv_format", "mask_type", "layer", "turns", "window", "causal"), CASES)
def test_it_equals_dense_attention(
    pool: Pool,
    qkv_format: str,
    mask_type: str,
    layer: int,
    turns: bool,
    window: tuple[int, int],
    causal: bool,
) -> None:
    found = pool.run(attended, qkv_format, mask_type, layer, turns)
    turns = turns and layer % 3 != 0
    assert all(x.shape[0] == 0 for x in found[4])
    for rank in range(4):
        for name, ours, theirs in zip(
            NAMES, found[rank], expected(causal, window, turns), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12, msg=f"{name}, rank {rank}")


@pytest.mark.parametrize(
    ("frequency", "turning"), [(None, [1, 2, 3, 4]), (2, [1, 3]), ([0, 1, 1, 0], [1, 4])]
)
def test_layers_without_rope_are_those_of_the_config(frequency: Any, turning: list[int]) -> None:
    settings = config(no_rope_freq=frequency)
    assert [layer for layer in range(1, 5) if _turns(settings, layer)] == turning


BUILT_WRONG: dict[str, dict[str, Any]] = {
    "attention_dropout is 0.1": {"attention_dropout": 0.1},
    "softmax_type is 'learnable'; set it to 'vanilla'": {"softmax_type": "learnable"},
    "context_parallel_size is 2; set it to 1": {"context_parallel_size": 2},
    "tensor_model_parallel_size is 2; set it to 1": {"tensor_model_parallel_size": 2},
    "pipeline_model_parallel_size is 4; set it to 1": {"pipeline_model_parallel_size": 4},
    "mtp_num_layers is 1; set it to None": {"mtp_num_layers": 1},
    r"rotary_base_per_layer is \[1.0\]; set it to None": {"rotary_base_per_layer": [1.0]},
}
CALLED_WRONG: dict[str, dict[str, Any]] = {
    "attention_mask is given": {"attention_mask": torch.ones(2, 2)},
    "attention_bias is given": {"attention_bias": torch.zeros(1)},
    "attn_mask_type is 'arbitrary'": {"attn_mask_type": AttnMaskType.arbitrary},
    "num_splits is 4": {"num_splits": 4},
    "carry no batch": {"packed_seq_params": PackedSeqParams(qkv_format="thd")},
}


CARRIED_WRONG: dict[str, dict[str, Any]] = {
    "qkv_format is 'bshd'": {"qkv_format": "bshd"},
    "one packed stream": {"qkv_format": "sbhd"},
    "packed_seq_params.cu_seqlens_q is set": {"cu_seqlens_q": torch.tensor([0, 1])},
}
WRONG = [*BUILT_WRONG, *CALLED_WRONG, *CARRIED_WRONG, "attention_type is 'cross'"]


def refused(rank: int, names: list[str], wrong_ranks: tuple[int, ...]) -> list[str]:
    """Worker: return what is told about each thing that some ranks ask for."""
    found = []
    for asked in names:
        name = asked if rank in wrong_ranks else ""
        kind = "cross" if "cross" in name else "self"
        with init(PLAN, device="cpu", timeout=TIMEOUT) as context:
            try:
                attention = DotProductAttention(
                    config(**BUILT_WRONG.get(name, {})),
                    1,
                    AttnMaskType.causal,
                    kind,
                    context=context,
                )
                batch = shard(context, random_qkv(PLAN, sum(LENGTHS), HEAD_DIM, seed=0))
                q, k, v = (batch[tensor] for tensor in "qkv")
                params = {"qkv_format": "thd"} | CARRIED_WRONG.get(name, {})
                packed = carry(PackedSeqParams(**params), batch)
                call = {"attention_mask": None, "packed_seq_params": packed}
                attention(q, k, v, **(call | CALLED_WRONG.get(name, {})))
                found.append("accepted")
            except HexiSeqError as error:
                found.append(f"{type(error).__name__}: {error}")
    return found


def test_what_it_cannot_honour_is_refused_by_name(pool: Pool) -> None:
    # the idle rank's refusal could come before the others have their rows
    for found in pool.run(refused, WRONG, (0, 1, 2, 3))[:4]:
        for expected_text, message in zip(WRONG, found, strict=True):
            assert re.search(f"InputError: .*{expected_text}", message)


def test_what_one_rank_refuses_the_others_hear_of(pool: Pool) -> None:
    names = ["attention_dropout is 0.1", "num_splits is 4"]
    found = pool.run(refused, names, (1,))
    for place, name in enumerate(names):
        first, wrong, third, fourth, _ = (told[place] for told in found)
        assert wrong.startswith(f"InputError: {name}")
        assert [first, third, fourth] == [f"PeerError: rank 1: {wrong}"] * 3


@pytest.mark.filterwarnings("ignore")  # Megatron's, about what else is not installed
def test_the_signatures_are_megatrons() -> None:
    """Of its own core attention: the one over Transformer Engine can't be imported without it."""
    local = pytest.importorskip("megatron.core.transformer.dot_product_attention")
    for method in ("__init__", "forward"):
        theirs = list(inspect.signature(getattr(local.DotProductAttention, method)).parameters)
        ours = list(inspect.signature(getattr(DotProductAttention, method)).parameters)
        assert [name for name in ours if name in theirs] == theirs
    packed = local.PackedSeqParams
    assert {f.name for f in fields(PackedSeqParams)} <= {f.name for f in fields(packed)}
    assert AttnMaskType.__members__.keys() <= local.AttnMaskType.__members__.keys()
