"""Model shapes: what decides a layer's FLOPs, parameters and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from hexiseq_triton.errors import ConfigError
from hexiseq_triton.planner.files import FILE_CONFIG, Count, build, in_a_line, read_mapping
from hexiseq_triton.planner.gpus import nearest

PRESETS = Path(__file__).with_name("models.yaml")
_FILES = (".json", ".yaml", ".yml")
"""How the names of files end; in others a dot is part of a model's name."""

_HUGGING_FACE = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "dff"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "vocab": ("vocab_size",),
    "tied": ("tie_word_embeddings",),
}
_PLAIN_MLP = {
    *("apertus", "apertus1p5_text", "arcee", "biogpt", "bloom", "codegen", "ctrl", "falcon"),
    *("gpt2", "gpt_bigcode", "gpt_neox", "gpt_neox_japanese", "gptj", "jais2", "nanochat"),
    *("nemotron", "openai-gpt", "opt", "persimmon", "phi", "starcoder2"),
}
"""Hugging Face model types whose MLP has two matrices; all others count as gated."""
_TIED = {
    *("biogpt", "bloom", "cohere", "cohere2", "ctrl", "ernie4_5", "falcon", "gemma", "gemma2"),
    *("gemma3_text", "gpt2", "gpt_bigcode", "gpt_neox_japanese", "openai-gpt", "opt", "smollm3"),
    "starcoder2",
}
"""Hugging Face model types that share the embedding unless the configuration says otherwise."""
_ENCODERS = {
    *("align_text_model", "big_bird", "canine", "chinese_clip_text_model", "clip_text_model"),
    *("data2vec-text", "electra", "ernie", "ernie_m", "esm", "esmc", "fnet", "funnel", "gte"),
    *("jina_embeddings_v3", "layoutlm"),
    *("layoutlmv2", "layoutlmv3", "lilt", "longformer", "luke", "markuplm", "mpnet", "mra"),
    *("nezha", "nystromformer", "retribert", "roformer", "siglip_text_model", "splinter"),
    *("tapas", "xmod", "yoso"),
}
"""Hugging Face model types that are encoders unless a configuration says that it is a decoder.

Those with "bert" in their name are, too.
"""
_ENCODER_DECODERS = {
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "fsmt", "led", "longt5"),
    *("m2m_100", "marian", "mbart", "mt5", "mvp", "nllb-moe", "pegasus", "pegasus_x"),
    *("plbart", "prophetnet", "switch_transformers", "t5", "t5gemma", "umt5", "whisper"),
}
"""Hugging Face model types that are encoders and decoders, or only the encoder of such."""
_CAUSAL = ("ForCausalLM", "LMHeadModel")
_MASKED = ("ForMaskedLM", "EncoderModel")
"""How the names of architectures end that are, and that are no, causal decoders."""
_NOT_MODELLED = {
    "num_local_experts": "a mixture of experts",
    "num_experts": "a mixture of experts",
    "moe_num_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "kv_lora_rank": "latent attention",
    "sliding_window": "a sliding window",
    "linear_conv_kernel_dim": "linear attention",
    "mamba_d_state": "state-space layers",
    "ssm_state_size": "state-space layers",
    "lru_width": "recurrent layers",
    "conv_L_cache": "convolution layers",
    "H_cycles": "layers that run several times",
    "block_configs": "layers that differ in shape",
    "layer_types": "other kinds of layers",
}
"""Fields of a Hugging Face configuration that change the costs in ways unknown here."""
_MODELLED = {"full_attention", "attention"}
"""What `layer_types` may call layers of full attention."""
MOST = 2**24
"""Of anything in a model's shape: more is a slip, and products of more would overflow."""
Size = Annotated[Count, Field(le=MOST)]


@in_a_line
@dataclass(frozen=True, config=FILE_CONFIG)
class ModelSpec:
    """A decoder's shape. `gated` MLPs have three matrices, others two."""

    layers: Size
    hidden: Size
    heads: Size
    ffn: Size
    vocab: Size
    kv_heads: Size = Field(default_factory=lambda given: given["heads"])
    head_dim: Size = Field(
        default_factory=lambda given: given["hidden"] // given["heads"], validate_default=True
    )
    gated: bool = True
    tied: bool = False

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads do not divide by {self.kv_heads} KV heads")

    @classmethod
    def load(cls, name_or_path: str | Path) -> ModelSpec:
        """Read a preset by name, a Hugging Face config.json, or a YAML file of these fields.

        Raises:
            ConfigError: if it is none of these, or a field is wrong.
        """
        if str(name_or_path) in presets():
            return presets()[str(name_or_path)]
        path = Path(name_or_path)
        if path.suffix not in _FILES and not path.exists():
            raise ConfigError(
                f"model is {str(name_or_path)!r}; presets near it: "
                f"{nearest(str(name_or_path), presets())}; or give a config.json or a YAML file"
            )
        content = read_mapping(path)
        if "text_config" in content or "model_type" in content:
            text = content.get("text_config")
            if isinstance(text, dict):  # whether the embedding is shared may stand outside of it
                content = {"tie_word_embeddings": content.get("tie_word_embeddings")} | text
            content = from_hugging_face(content, str(path))
        return build(cls, content, str(path))

    @property
    def layer_matrix_parameters(self) -> int:
        """Parameters of one layer's matrices: two FLOPs each for every token."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def parameters_per_layer(self) -> int:
        """Matrices and the two norms of one layer."""
        return self.layer_matrix_parameters + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """All layers, the embedding, the output matrix unless tied, and the last norm."""
        embeddings = (1 if self.tied else 2) * self.vocab * self.hidden
        return self.layers * self.parameters_per_layer + embeddings + self.hidden


@cache
def presets() -> dict[str, ModelSpec]:
    """Return the models of `models.yaml` by name."""
    return build(dict[str, ModelSpec], read_mapping(PRESETS), PRESETS.name)


def from_hugging_face(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return ModelSpec's fields from a Hugging Face configuration.

    Raises:
        ConfigError: if the configuration lacks a needed field, under any name known here, or
            describes what the cost model doesn't know.
    """
    _check_decoder(config, source)
    _check_modelled(config, source)
    model_type = str(config.get("model_type"))
    fields: dict[str, Any] = {"gated": model_type not in _PLAIN_MLP, "tied": model_type in _TIED}
    for field, names in _HUGGING_FACE.items():
        found = [config[name] for name in names if config.get(name) is not None]
        if found:
            fields[field] = found[0]
        elif field in ("layers", "hidden", "heads", "vocab"):
            raise ConfigError(f"{source}: {' or '.join(names)} is missing; {field} is read from it")
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        fields["kv_heads"] = 1
    if "ffn" not in fields and isinstance(fields["hidden"], int):
        fields["ffn"] = 4 * fields["hidden"]
    if model_type == "qwen" and isinstance(fields["ffn"], int):
        fields["ffn"] //= 2  # the first Qwen counts its gate and what is gated as one
    return fields


def _check_decoder(config: Mapping[str, Any], source: str) -> None:
    """Refuse encoders. `is_decoder` tells them apart only if true: decoders leave it at false."""
    named = config.get("architectures")
    architectures = [str(name) for name in named] if isinstance(named, list) else []
    if config.get("is_decoder") is True or any(name.endswith(_CAUSAL) for name in architectures):
        return
    model_type = str(config.get("model_type"))
    masked = [name for name in architectures if name.endswith(_MASKED)]
    if config.get("is_encoder_decoder") is True:
        found = f"is_encoder_decoder is True and model_type {model_type!r}"
    elif model_type in _ENCODERS | _ENCODER_DECODERS or _is_bert(model_type):
        found = f"model_type is {model_type!r}"
    elif masked:
        found = f"architectures has {masked[0]!r}"
    else:
        return
    raise ConfigError(
        f"{source}: {found}: no causal decoder; the cost model knows only those: give the "
        "configuration of a decoder, or set is_decoder to true if this model is one"
    )


def _is_bert(model_type: str) -> bool:
    return "bert" in model_type and not model_type.endswith("decoder")


def _check_modelled(config: Mapping[str, Any], source: str) -> None:
    for field, what in _NOT_MODELLED.items():
        value = config.get(field)
        used = value not in (None, 0, 1)
        if field == "sliding_window":
            used = used and config.get("use_sliding_window", True)
        elif field == "layer_types" and isinstance(value, list):
            value = sorted({str(kind) for kind in value} - _MODELLED)
            used = bool(value)
        if used:
            shown = "given" if field == "block_configs" else repr(value)  # an entry for each layer
            raise ConfigError(
                f"{source}: {field} is {shown}; the cost model doesn't know {what}, only "
                "dense layers with full attention: remove the field to plan for those"
            )
