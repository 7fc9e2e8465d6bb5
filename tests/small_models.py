"""transformers' models in small, with random weights, and batches and plans for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hexiseq_triton.planner import Plan, Split

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
SLIDING = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
LLAMA4 = {
    "num_local_experts": 2,
    "intermediate_size_mlp": 96,
    "no_rope_layer_interval": 2,
    "attn_temperature_tuning": False,
}
LATENT = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,  # of what RoPE turns
}
"""Of attention whose values are narrower than its keys, one KV head for each query head."""
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 9}),
    "gemma2": ("Gemma2Config", {"sliding_window": 9, "attn_logit_softcapping": 2.0}),
    "gpt_oss": (
        "GptOssConfig",
        {"sliding_window": 9, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "qwen2": ("Qwen2Config", {}),
    "qwen3_moe": ("Qwen3MoeConfig", EXPERTS | {"num_experts": 4}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": 9}),
    "gemma3": ("Gemma3TextConfig", SLIDING),
    "phi3": ("Phi3Config", {}),
    "olmo2": ("Olmo2Config", {}),
    "granite": ("GraniteConfig", {"attention_multiplier": 0.3, "logits_scaling": 2.0}),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 2}),  # a layer without positions
    "cohere2": ("Cohere2Config", SLIDING),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 9}),
    "deepseek_v2": ("DeepseekV2Config", LATENT | {"first_k_dense_replace": 2}),
    "deepseek_v3": (
        "DeepseekV3Config",
        LATENT
        | EXPERTS
        | {"q_lora_rank": 24, "n_routed_experts": 4, "n_group": 2, "topk_group": 1},
    ),
    "minicpm3": ("MiniCPM3Config", LATENT | {"q_lora_rank": 24}),
    "llama4": ("Llama4TextConfig", LLAMA4 | {"attention_chunk_size": 64}),
}
"""Models that equal themselves."""
LENGTHS = [[31, 1, 40, 0, 24], [96], [5, 60, 31]]
"""Documents of three passes, 96 tokens each."""

PLANS = {
    # ranks 1 and 3 have no token, rank 3 no head either; rank 4 is idle
    "uneven": Plan.from_splits(
        [Split((40, 0), (5, 3)), Split((56, 0), (8, 0))], num_kv_heads=2, world_size=5
    ),
    "a KV head for each query head": Plan.from_splits(
        [Split((40, 0), (5, 3)), Split((56, 0), (8, 0))], num_kv_heads=8, world_size=5
    ),
    "even": Plan.from_splits(
        [Split((24, 24), (4, 4)), Split((24, 24), (4, 4))], num_kv_heads=2, world_size=5
    ),
}


def small_model(name: str) -> nn.Module:
    """Return one of the models that equal themselves."""
    return model_of(*CONFIGS[name])


def model_of(config_name: str, extra: dict[str, Any]) -> nn.Module:
    """Return a model with random weights, the same in every process."""
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**(SMALL | extra))
    config._attn_implementation = "eager"
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model.train()


def import_all(rank: int) -> None:
    """Worker: import what the tests need, which takes long, before anybody waits for anybody."""
    from hexiseq_triton.integrations import hf

    hf.register()
    for name in CONFIGS:
        small_model(name)


def stream(lengths: list[int], seed: int) -> dict[str, torch.Tensor]:
    """Return a packed batch [1, T] as a collator makes it: ids, unshifted labels, positions."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, SMALL["vocab_size"], (1, sum(lengths)), generator=generator)
    labels = ids.clone()
    labels[0, ::7] = -100
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": ids, "labels": labels, "position_ids": positions}
