"""Megatron-core: a core attention under an uneven plan, in the place of Transformer Engine's.

    core_attention = ModuleSpec(module=DotProductAttention, params={"context": context})
    batch = context.shard({"tokens": tokens, "labels": labels}, cu_seqlens=cu_seqlens)
    packed = carry(PackedSeqParams(qkv_format="thd"), batch, rope=(cos, sin))
    out = model(..., attention_mask=None, packed_seq_params=packed)

It is built and called as Megatron's `TEDotProductAttention` is. The layout travels inside the
`PackedSeqParams`, which Megatron hands through to every layer, recomputed ones too; both of its
formats, thd and sbhd, hold this rank's rows as one packed stream.

Megatron counts positions from 0 on every rank, which is wrong where a rank's rows begin inside a
document: build the model with `position_embedding_type="none"` and give RoPE to `carry`. Its own
attention layer takes no empty rows: use a plan in which every rank holds tokens.

Neither Megatron-core nor Transformer Engine is imported.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from hexiseq_triton.attention import hexiseq_attention
from hexiseq_triton.context import ParallelContext
from hexiseq_triton.errors import InputError
from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.rope import RopeLike
from hexiseq_triton.shard import LocalBatch

NAME = "hexiseq"
Params = TypeVar("Params")

_CAUSAL = {
    "causal": True,
    "padding_causal": True,
    "causal_bottom_right": True,
    "padding_causal_bottom_right": True,
    "no_mask": False,
    "padding": False,
}
"""What a mask type says of one document; keys are its queries, so both corners are one."""

_HELD_BY_THE_LAYOUT = (
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "cu_seqlens_q_padded",
    "cu_seqlens_kv_padded",
    "local_cp_size",
    "cp_group",
)

_FIXED = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "mtp_num_layers": None,
    "rotary_base_per_layer": None,
    "softmax_type": "vanilla",
    "apply_query_key_layer_scaling": False,
    "fp8_dot_product_attention": False,
    "fp8_multi_head_attention": False,
    "qk_clip": False,
    "log_max_attention_logit": False,
}
"""The values of a TransformerConfig that are supported; the plan splits tokens and heads.

Multi-token prediction shifts tokens within a rank's rows, past the ends of documents and shards.
"""


class _Carried(NamedTuple):
    """What attention needs of a batch besides tensors."""

    layout: BatchLayout
    rope: RopeLike | None


def carry(packed_seq_params: Params, batch: LocalBatch, *, rope: RopeLike | None = None) -> Params:
    """Make Megatron's PackedSeqParams carry a batch to every core attention; return them.

    Args:
        packed_seq_params: a fresh one that sets `qkv_format`, "thd" or "sbhd", and no lengths.
        batch: this rank's rows, from `context.shard`.
        rope: turns q and k of these rows, as in `hexiseq_attention`; of `batch.position_ids`.
            Layers that the config's `no_rope_freq` names leave it out.

    Raises:
        InputError: if lengths or a context parallel group are set.
    """
    for name in _HELD_BY_THE_LAYOUT:
        if getattr(packed_seq_params, name, None) is not None:
            raise InputError(
                f"packed_seq_params.{name} is set; the batch's layout holds the documents and who "
                "has them: leave it out"
            )
    setattr(packed_seq_params, NAME, _Carried(batch.layout, rope))
    return packed_seq_params


class DotProductAttention(nn.Module):
    """The core attention of a layer; Megatron builds it, `context` stands in the spec's params.

    Args:
        config: the TransformerConfig; its window, dropout, `no_rope_freq` and
            `deterministic_mode` hold.
        layer_number: from 1; some layers may have no window, or not turn.
        attn_mask_type: Megatron's enum or a name of it, where a call says none.
        attention_type: only "self".
        attention_dropout: only 0.0; the config's if left out.
        softmax_scale: multiplies q . k; D ** -0.5 if left out.
        k_channels: not needed; the tensors say it.
        v_channels: not needed; must be those of the keys.
        num_splits: only None.
        cp_comm_type: not needed; the plan says how ranks exchange.
        pg_collection: not needed; the context has its own groups.
        context: the live plan.

    Raises:
        InputError: if the config asks for something that is not supported.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        *,
        context: ParallelContext,
    ) -> None:
        super().__init__()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        with context.guard():
            if dropout:
                raise InputError(
                    f"attention_dropout is {dropout}; it is not supported: set it to 0.0"
                )
            if attention_type != "self":
                raise InputError(f"attention_type is {attention_type!r}; only 'self' is supported")
            for name, fits in _FIXED.items():
                if getattr(config, name, fits) != fits:
                    raise InputError(f"{name} is {getattr(config, name)!r}; set it to {fits!r}")
            _refuse_splits(num_splits)
        self.context = context
        self.softmax_scale = softmax_scale
        self.window_size = _window(config, layer_number)
        self.turns = _turns(config, layer_number)
        self.deterministic = bool(getattr(config, "deterministic_mode", False))
        self.attn_mask_type = attn_mask_type

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        num_splits: int | None = None,
    ) -> torch.Tensor:
        """Attend over all tokens of the replica's batch; a collective call.

        Args:
            query: this rank's rows, [T, H, D] in thd or [T, 1, H, D] in sbhd.
            key: as query with H_kv heads.
            value: as key.
            attention_mask: only None.
            attn_mask_type: causal or none, in any of Megatron's spellings.
            attention_bias: only None.
            packed_seq_params: what `carry` returned; its `qkv_format` holds.
            num_splits: only None.

        Returns:
            The output, [T, H * D] in thd or [T, 1, H * D] in sbhd.

        Raises:
            InputError: if the batch is missing, or something is asked for that is not supported.
            PeerError: if another rank failed, with its message.
        """
        with self.context.guard():
            if attention_mask is not None:
                raise InputError("attention_mask is given; only packed documents work: pass None")
            if attention_bias is not None:
                raise InputError("attention_bias is given; it is not supported: pass None")
            _refuse_splits(num_splits)
            carried = getattr(packed_seq_params, NAME, None)
            if not isinstance(carried, _Carried):
                raise InputError(
                    "packed_seq_params carry no batch; pass the model what "
                    "hexiseq_triton.integrations.megatron.carry returns"
                )
            is_thd = _is_thd(packed_seq_params.qkv_format, query)
            mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
            causal = _is_causal(mask_type)
        q, k, v = (x if is_thd else x.squeeze(1) for x in (query, key, value))
        out = hexiseq_attention(
            q,
            k,
            v,
            self.context,
            carried.layout,
            softmax_scale=self.softmax_scale,
            causal=causal,
            window_size=self.window_size,
            rope=carried.rope if self.turns else None,
            deterministic=self.deterministic,
        ).flatten(-2)
        return out if is_thd else out[:, None]

    def extra_repr(self) -> str:
        return f"window_size={self.window_size}, turns={self.turns}"


def _refuse_splits(num_splits: int | None) -> None:
    if num_splits is not None:
        raise InputError(f"num_splits is {num_splits}; it is not supported: leave it out")


def _is_thd(qkv_format: str | None, query: torch.Tensor) -> bool:
    """Return whether rows come without a batch dimension."""
    dims = {"thd": 3, "sbhd": 4}
    if qkv_format not in dims:
        raise InputError(
            f"packed_seq_params.qkv_format is {qkv_format!r}; it must be 'thd' or 'sbhd'"
        )
    if query.dim() != dims[qkv_format] or (qkv_format == "sbhd" and query.shape[1] != 1):
        raise InputError(
            f"query has shape {tuple(query.shape)}; in {qkv_format} one packed stream is "
            f"{'[T, heads, D]' if qkv_format == 'thd' else '[T, 1, heads, D]'}"
        )
    return qkv_format == "thd"


def _is_causal(mask_type: Any) -> bool:
    """Return what Megatron's mask type, an enum or its name, says."""
    name = getattr(mask_type, "name", mask_type)
    if name not in _CAUSAL:
        raise InputError(f"attn_mask_type is {name!r}; supported: {', '.join(_CAUSAL)}")
    return _CAUSAL[name]


def _window(config: Any, layer_number: int) -> tuple[int, int]:
    """Return this layer's window; a frequency f leaves every f-th layer, a list its zeros, open."""
    window = getattr(config, "window_size", None)
    frequency = getattr(config, "window_attn_skip_freq", None)
    if isinstance(frequency, int):
        has_window = layer_number % frequency != 0
    else:
        has_window = frequency is None or bool(frequency[layer_number - 1])
    return (window[0], window[1]) if window and has_window else (-1, -1)


def _turns(config: Any, layer_number: int) -> bool:
    """Return whether this layer has RoPE; a frequency f takes it from every f-th, a list by 1."""
    frequency = getattr(config, "no_rope_freq", None)
    if not frequency:
        return True
    if isinstance(frequency, int):
        return layer_number % frequency != 0
    return not frequency[layer_number - 1]
