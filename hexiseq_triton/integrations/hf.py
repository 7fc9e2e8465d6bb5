"""Hugging Face transformers: decoder models under an uneven plan, through their public hooks.

    hf.register()                                   # once a process
    model.set_attn_implementation("hexiseq")
    batch = hf.shard(context, {"input_ids": ids, "labels": labels}, cu_seqlens=cu_seqlens)
    logits = model(**batch.inputs).logits           # this rank's tokens
    loss = batch.token_mean(logits, grad_average=context.mesh.size())

The context and the layout travel with the call, as its keyword `hexiseq`: nothing is kept between
calls, so two plans can take turns in one process. transformers' attention functions get q, k and v
as [1, heads, T, D], already turned by RoPE, and return [1, T, heads, D].

Only models whose tokens meet in attention alone equal themselves; others are refused (`hf_models`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from hexiseq_triton.attention import hexiseq_attention
from hexiseq_triton.errors import InputError
from hexiseq_triton.integrations.hf_batches import NAME, HFBatch, shard
from hexiseq_triton.integrations.hf_models import check_arguments, check_layers, check_lengths

__all__ = ["NAME", "HFBatch", "attention", "no_mask", "register", "shard"]


def register(name: str = NAME) -> None:
    """Make `model.set_attn_implementation(name)` known to transformers; again is harmless.

    Raises:
        InputError: if transformers would take `name` for one of its own flash kernels.
    """
    if "flash" in name:
        raise InputError(f"name is {name!r}; transformers treats names with 'flash' specially")
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, no_mask)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers asks; the function behind the name.

    Args:
        module: the model's attention layer; its `is_causal` holds unless the argument is given.
        query: [1, H, T, D].
        key: [1, H_kv, T, D].
        value: as key.
        attention_mask: only None; `no_mask` lets through what it cannot leave out.
        scaling: multiplies q . k; D ** -0.5 if left out.
        dropout: only 0.0.
        sliding_window: tokens that a token sees, itself included.
        softcap: caps scores at c * tanh(s / c).
        s_aux: learnable sinks, [H].
        is_causal: a token sees none after itself.
        arguments: the model call's others, `hexiseq` among them.

    Returns:
        The output, [1, T, H, D], and no attention weights.

    Raises:
        InputError: if `hexiseq` is missing, or something is asked for that is not supported; the
            other ranks hear of the latter, while nothing leads from a call without it to them.
    """
    batch = arguments.get(NAME)
    if not isinstance(batch, HFBatch):
        raise InputError(
            f"the model was called without {NAME}=; call it as model(**batch.inputs) with the "
            "batch of hexiseq_triton.integrations.hf.shard (to generate, choose another attention "
            f"again; if it was so called, {type(module).__name__} gets no keywords from its model, "
            "which is not supported)"
        )
    call = (
        module, batch, query, key, value, attention_mask,
        scaling, dropout, sliding_window, softcap, s_aux, is_causal, arguments,
    )  # fmt: skip
    if batch.local.layout.is_alone or not torch.compiler.is_compiling():
        return _attend(*call), None
    from hexiseq_triton import uncompiled

    return uncompiled.call(_attend, *call), None


def _attend(
    module: torch.nn.Module,
    batch: HFBatch,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: torch.Tensor | None,
    is_causal: bool | None,
    arguments: Mapping[str, Any],
) -> torch.Tensor:
    """Return the output, [1, T, H, D]; the arguments are those of `attention`."""
    batch.note_attention()
    with batch.context.guard():
        _check(batch, query, key, attention_mask, dropout)
        check_arguments(module, arguments)
        check_lengths(module, batch.local.layout, sliding_window, is_causal)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    rows = batch.num_tokens
    dtype = _compute_dtype(query)
    q, k, v = (x[0].transpose(0, 1)[:rows].to(dtype) for x in (query, key, value))
    out = hexiseq_attention(
        q,
        k,
        v,
        batch.context,
        batch.local.layout,
        softmax_scale=scaling,
        causal=causal,
        window_size=_window(sliding_window, causal),
        softcap=softcap or 0.0,
        learnable_sink=s_aux,
    )
    return F.pad(out, (0, 0, 0, 0, 0, int(batch.is_padded)))[None]


def _check(
    batch: HFBatch,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
) -> None:
    rows = batch.num_tokens + batch.is_padded
    if dropout:
        raise InputError(
            f"attention dropout is {dropout}; it is not supported: set attention_dropout to 0.0"
        )
    if attention_mask is not None:
        raise InputError(
            "attention_mask hides tokens or is a bias; only packed documents work: call the model "
            "as model(**batch.inputs)"
        )
    if key.shape[2] != query.shape[2]:
        raise InputError(
            f"{query.shape[2]} queries meet {key.shape[2]} keys; decoding with a KV cache is not "
            "supported: call the model with use_cache=False"
        )
    if query.shape[0] != 1 or query.shape[2] != rows:
        raise InputError(
            f"attention got [{query.shape[0]}, {query.shape[2]}] tokens; the batch holds "
            f"[1, {rows}]: call the model as model(**batch.inputs)"
        )


def _compute_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype to attend in: under autocast rotary tables may have made q and k float32."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _window(sliding_window: int | None, causal: bool) -> tuple[int, int]:
    """Return flash-attention's window: it does not count the token itself, transformers does."""
    if sliding_window is None:
        return (-1, -1)
    return (sliding_window - 1, 0 if causal else sliding_window - 1)


def no_mask(
    *_: Any, attention_mask: torch.Tensor | None = None, config: Any = None, **__: Any
) -> torch.Tensor | None:
    """Make no mask, the layout knows the documents; attention refuses one that hides tokens.

    Raises:
        InputError: if some of the model's layers do not attend.
    """
    check_layers(config)
    if attention_mask is not None and not bool(attention_mask.all()):
        return attention_mask
    return None
