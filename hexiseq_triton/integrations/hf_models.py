"""Which of transformers' models equal themselves under a plan: tokens meet in attention alone.

Others would be wrong without a word, so they are refused, as far as their config or their calls
tell; docs/huggingface.md lists them. Every rank finds the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hexiseq_triton.errors import InputError
from hexiseq_triton.layout import BatchLayout

_ATTENDING = ("full_attention", "attention", "sliding_attention", "chunked_attention")
"""The kinds of layers in which tokens meet by attention alone, as a config's `layer_types` say."""
_NOT_HONOURED = ("position_bias", "indices", "block_indices", "sinks")
"""What some models' layers pass to attention besides, which changes the scores."""


def check_layers(config: Any) -> None:
    """Refuse a model with layers that would mix the tokens of a rank alone."""
    told = [getattr(config, name, None) or () for name in ("layer_types", "layers_block_type")]
    others = {kind for kinds in told for kind in kinds} - set(_ATTENDING)
    if others:
        raise InputError(
            f"{type(config).__name__} has layers of {', '.join(sorted(others))}, which would see "
            "only the tokens of their rank; every layer must be full or sliding attention: use "
            "another model"
        )


def check_arguments(module: torch.nn.Module, arguments: Mapping[str, Any]) -> None:
    """Refuse a layer that passes something that attention would drop."""
    for name in _NOT_HONOURED:
        if arguments.get(name) is not None:
            raise InputError(
                f"{type(module).__name__} passes {name} to attention; it is not supported: use "
                "another model"
            )


def check_lengths(
    module: torch.nn.Module,
    layout: BatchLayout,
    sliding_window: int | None,
    is_causal: bool | None,
) -> None:
    """Refuse documents so long that a layer would not attend as the model's config says.

    `sliding_window` and `is_causal` are what it passes to attention. An encoder passes its window
    as flash kernels count, itself included; of a decoder with `is_causal=False` transformers' eager
    and sdpa attentions let each side see one token more.
    """
    config = getattr(module, "config", None)
    longest = max(layout.document_lengths, default=0)
    layers = getattr(config, "layer_types", None)
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk and "chunked_attention" in (layers or ()) and longest > chunk:
        raise InputError(
            f"a document has {longest} tokens, and layers of the model attend in chunks of "
            f"attention_chunk_size {chunk}, which is not supported: use documents of up to {chunk}"
        )
    scale = getattr(config, "floor_scale", 0)
    if getattr(config, "attn_temperature_tuning", False) and layout.total_tokens >= scale:
        raise InputError(
            f"the batch has {layout.total_tokens} tokens and the model's attn_temperature_tuning "
            f"counts the rows of a rank from floor_scale {scale} on, not positions: set it to False"
        )
    window, index = getattr(config, "sliding_window", None), getattr(module, "layer_idx", None)
    slides = layers is None or (index is not None and layers[index] == "sliding_attention")
    if sliding_window is None and window and longest > window and slides:
        raise InputError(
            f"a document has {longest} tokens and the config's sliding_window is {window}, but "
            f"{type(module).__name__} does not pass it to attention: use documents of up to "
            f"{window}, or set sliding_window to None"
        )
    asked_both_ways = is_causal is False and getattr(module, "is_causal", True)
    if sliding_window is not None and asked_both_ways and longest > sliding_window:
        raise InputError(
            f"a document has {longest} tokens and {type(module).__name__} attends both ways "
            f"(is_causal=False) within sliding_window {sliding_window}, which transformers' "
            f"attentions take for {sliding_window - 1} or for {sliding_window} tokens to each "
            f"side: use documents of up to {sliding_window}, or set sliding_window to None"
        )
    if layout.is_alone:
        return
    for kind, limit in _moving_ropes(config):
        if longest > limit:
            raise InputError(
                f"a document has {longest} tokens and the model's rope_type is {kind!r}, which "
                f"beyond {limit} goes by the last position that a rank holds, and ranks would "
                f"differ: use documents of up to {limit}, or a fixed rope_type such as 'yarn'"
            )


def _moving_ropes(config: Any) -> list[tuple[str, int]]:
    """Return the kinds of RoPE that depend on the longest sequence, and from which length on."""
    told = getattr(config, "rope_parameters", None) or {}
    found = []
    for rope in (told, *told.values()):  # one for all layers, or one for each of their kinds
        kind = rope.get("rope_type") if isinstance(rope, dict) else None
        if kind is not None and ("dynamic" in kind or kind == "longrope"):
            limit = config.max_position_embeddings
            if kind == "longrope":
                limit = rope.get("original_max_position_embeddings", limit)
            found.append((kind, limit))
    return found
