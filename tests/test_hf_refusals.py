"""What the integration of transformers refuses, by name and on every rank."""

from __future__ import annotations

import inspect
import time
import warnings
from typing import Any

import pytest
import torch
from pool import TIMEOUT, Pool
from small_models import (
    EXPERTS,
    LENGTHS,
    LLAMA4,
    PLANS,
    SLIDING,
    model_of,
    small_model,
    stream,
    transformers,
)

from hexiseq_triton.context import init
from hexiseq_triton.errors import HexiSeqError, InputError, PeerError

LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "mamba": ("MambaConfig", {}, "the model's layers did not call 'hexiseq'"),
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 8}, "the model's layers did not call"),
    "lfm2": (
        "Lfm2Config",
        {"layer_types": ["conv", "full_attention"], "block_ff_dim": 96},
        "Lfm2Config has layers of conv",
    ),
    "llama4": (
        "Llama4TextConfig",
        LLAMA4 | {"attention_chunk_size": 16},
        "a document has 60 tokens, and layers of the model attend in chunks of "
        "attention_chunk_size 16",
    ),
    "llama4 by temperature": (
        "Llama4TextConfig",
        LLAMA4 | {"attention_chunk_size": 64, "attn_temperature_tuning": True, "floor_scale": 8},
        "the batch has 96 tokens and the model's attn_temperature_tuning counts the rows",
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        EXPERTS | SLIDING | {"num_experts": 4, "use_sliding_window": True},
        "a document has 60 tokens and the config's sliding_window is 9, but Qwen2MoeAttention",
    ),
    "mistral both ways": (
        "MistralConfig",
        {"sliding_window": 9, "is_causal": False},
        "a document has 60 tokens and MistralAttention attends both ways (is_causal=False) within "
        "sliding_window 9",
    ),
    "longrope": (
        "Phi3Config",
        {
            "hidden_size": 128,
            "max_position_embeddings": 256,
            "original_max_position_embeddings": 32,
            "rope_parameters": LONGROPE
            | {"rope_theta": 1e4, "original_max_position_embeddings": 32},
        },
        "the model's rope_type is 'longrope', which beyond 32",
    ),
    "dynamic": (
        "LlamaConfig",
        {
            "max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        },
        "the model's rope_type is 'dynamic', which beyond 32",
    ),
}
"""Models in which tokens would see others than in one process, or be turned differently."""


def refused(rank: int, what: str, wrong_ranks: tuple[int, ...]) -> str:
    """Worker: what a call raises that asks for something unsupported on some of the ranks."""
    from hexiseq_triton.integrations import hf

    model = small_model("llama")
    model.set_attn_implementation("hexiseq")
    batch = stream([96], 0)
    with init(PLANS["even"], device="cpu", timeout=TIMEOUT) as context:
        local = hf.shard(context, batch)
        inputs = local.inputs
        if rank not in wrong_ranks:
            pass
        elif what == "batch":
            del inputs["hexiseq"]
        elif what == "dropout":
            for layer in model.model.layers:
                layer.self_attn.attention_dropout = 0.1
        elif what == "mask":
            inputs["attention_mask"] = torch.zeros(inputs["input_ids"].shape)
        elif what == "tokens":
            inputs |= {key: inputs[key][:, :3] for key in ("input_ids", "position_ids")}
        elif what == "cache":
            inputs["use_cache"] = True
            cache = transformers.DynamicCache(config=model.config)
            shape = (1, 2, 3, 16)
            for layer in range(2):
                cache.update(torch.zeros(shape), torch.zeros(shape), layer)
            known = inspect.signature(model.forward).parameters  # it was renamed within 5.x
            inputs["cache" if "cache" in known else "past_key_values"] = cache
        try:
            model(**inputs)
        except (InputError, PeerError) as error:
            return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("batch", "called without hexiseq="),
        ("dropout", "attention dropout is 0.1"),
        ("mask", "attention_mask hides tokens"),
        ("tokens", "the batch holds"),
        ("cache", "decoding with a KV cache"),
    ],
)
def test_what_is_not_supported_is_named(ready: Pool, what: str, message: str) -> None:
    for found in ready.run(refused, what, (0, 1, 2, 3))[:4]:
        assert found.startswith("InputError: ")
        assert message in found


@pytest.mark.parametrize("what", ["dropout", "mask"])
def test_what_one_rank_refuses_the_others_hear_of_soon(ready: Pool, what: str) -> None:
    began = time.monotonic()
    found = ready.run(refused, what, (1,))
    assert time.monotonic() - began < TIMEOUT.total_seconds() / 2  # they wait for it in between
    for rank in (0, 2, 3):
        assert found[rank] == f"PeerError: rank 1: {found[1]}"


def refused_model(rank: int, name: str | None) -> str:
    """Worker: what a forward pass of a model raises, or the loss made of it.

    None is a model that would do, but whose attention was not chosen.
    """
    from hexiseq_triton.integrations import hf

    model = small_model("llama") if name is None else model_of(*REFUSED[name][:2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name is not None:
            model.set_attn_implementation("hexiseq")
    with init(PLANS["uneven"], device="cpu", timeout=TIMEOUT) as context:
        try:
            batch = hf.shard(context, stream(LENGTHS[2], 0))
            logits = model(**batch.inputs).logits
            if context.replica is not None or not batch._calls.attended:
                batch.token_mean(logits, grad_average=1)
        except HexiSeqError as error:  # or what the idle rank, which waits for nobody, says of it
            return str(error)
    return "accepted"


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_would_not_equal_itself_is_refused(ready: Pool, name: str) -> None:
    for found in ready.run(refused_model, name)[:4]:
        assert REFUSED[name][2] in found


def test_an_attention_that_was_not_chosen_is_named(ready: Pool) -> None:
    for found in ready.run(refused_model, None):
        assert "call model.set_attn_implementation('hexiseq')" in found


def cut_logits(rank: int) -> str:
    """Worker: what a batch says to logits of some of its tokens."""
    from hexiseq_triton.integrations import hf

    model = small_model("llama")
    model.set_attn_implementation("hexiseq")
    with init(PLANS["even"], device="cpu", timeout=TIMEOUT) as context:
        batch = hf.shard(context, stream([96], 0))
        try:
            batch.token_mean(model(**batch.inputs, logits_to_keep=3).logits, grad_average=1)
        except HexiSeqError as error:
            return str(error)
    return "accepted"


def test_logits_of_some_tokens_are_refused(ready: Pool) -> None:
    for found in ready.run(cut_logits)[:4]:
        assert "logits have shape (1, 3, " in found


def misfit(rank: int, extra: dict[str, Any], dropped: str) -> str:
    """Worker: what a batch raises with more in it than tensors of its tokens, or with less."""
    from hexiseq_triton.integrations import hf

    batch = {"input_ids": torch.ones(2, 48).long(), "labels": torch.ones(2, 48).long()} | extra
    batch.pop(dropped, None)
    with init(PLANS["even"], device="cpu", timeout=TIMEOUT) as context:
        try:
            return str(hf.shard(context, batch).num_label_tokens)
        except HexiSeqError as error:  # as above
            return str(error)


@pytest.mark.parametrize(
    ("extra", "dropped", "message"),
    [
        ({"text": ["a", "b"]}, "", "text is a list, not a tensor of the tokens"),
        ({"sample": torch.ones(2)}, "", "sample has shape (2,); it must begin with"),
        ({"token_type_ids": torch.ones(2, 48)}, "", "token_type_ids are not all 0"),
        ({"position_ids": torch.ones(2, 3, 48)}, "", "position_ids has shape (2, 3, 48); it must"),
        (
            {"position_ids": torch.arange(48) + 100 * (torch.arange(48) > 9).expand(2, -1)},
            "",
            "position_ids do not count from 0 in each document",
        ),
        ({"position_ids": torch.arange(96).view(2, 48)}, "", "position_ids do not count from 0"),
        ({}, "input_ids", "the batch has no tensor input_ids, only labels"),
        ({}, "labels", "the batch has no labels, only input_ids"),
    ],
)
def test_what_a_batch_lacks_or_would_lose_is_named(
    ready: Pool, extra: dict[str, Any], dropped: str, message: str
) -> None:
    for found in ready.run(misfit, extra, dropped)[:4]:
        assert message in found


def test_names_with_flash_are_refused() -> None:
    from hexiseq_triton.integrations import hf

    with pytest.raises(InputError, match="flash"):
        hf.register("my_flash")


def padded_batch(rank: int) -> str:
    """Worker: what a batch raises that is padded on rank 1."""
    from hexiseq_triton.integrations import hf

    mask = torch.ones(2, 48)
    if rank == 1:
        mask[1, 40:] = 0
    with init(PLANS["even"], device="cpu", timeout=TIMEOUT) as context:
        try:
            hf.shard(context, {"input_ids": torch.ones(2, 48).long(), "attention_mask": mask})
        except InputError as error:
            return str(error)
    return "accepted"


def test_padding_is_refused(ready: Pool) -> None:
    for found in ready.run(padded_batch)[:4]:
        assert found.startswith(
            "rank 1: attention_mask hides tokens; pack the documents without padding"
        )
