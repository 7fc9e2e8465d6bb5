"""Model shapes: presets, Hugging Face configurations, YAML, and workloads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hexiseq_triton.cli import app
from hexiseq_triton.errors import ConfigError
from hexiseq_triton.planner.files import build
from hexiseq_triton.planner.models import ModelSpec, presets
from hexiseq_triton.planner.workload import Workload

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}


def config_file(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("3b", 2.6),
        ("7b", 6.6),
        ("13b", 12.8),
        ("30b", 32.2),
        ("70b", 64.8),
        ("llama3-8b", 8.0),
        ("llama3-70b", 70.6),
        ("qwen3-style", 4.0),
    ],
)
def test_presets_have_the_parameters_of_their_name(name: str, billions: float) -> None:
    assert ModelSpec.load(name).parameters / 1e9 == pytest.approx(billions, rel=0.02)


def test_parameters_of_a_small_model_by_hand() -> None:
    model = ModelSpec(layers=2, hidden=8, heads=4, kv_heads=2, ffn=16, vocab=10)

    attention = 8 * 8 + 2 * 8 * 4 + 8 * 8
    assert model.layer_matrix_parameters == attention + 3 * 8 * 16
    assert model.parameters == 2 * (attention + 3 * 8 * 16 + 2 * 8) + 2 * 10 * 8 + 8


def test_qwen_style_heads_are_wider_than_hidden() -> None:
    model = ModelSpec.load("qwen3-style")

    assert model.heads * model.head_dim > model.hidden


def test_hugging_face_llama_equals_the_preset(tmp_path: Path) -> None:
    assert ModelSpec.load(config_file(tmp_path, LLAMA)) == ModelSpec.load("llama3-8b")


def test_hugging_face_text_config_is_found(tmp_path: Path) -> None:
    wrapped = {"model_type": "some_vision_model", "text_config": LLAMA}

    assert ModelSpec.load(config_file(tmp_path, wrapped)) == ModelSpec.load("llama3-8b")


def test_hugging_face_text_config_shares_its_embedding_as_said_outside(tmp_path: Path) -> None:
    text = {name: value for name, value in LLAMA.items() if name != "tie_word_embeddings"}
    wrapped = {"model_type": "any", "tie_word_embeddings": True, "text_config": text}

    assert ModelSpec.load(config_file(tmp_path, wrapped)).tied


def test_hugging_face_gpt2_has_a_plain_mlp_of_four_times_hidden(tmp_path: Path) -> None:
    model = ModelSpec.load(config_file(tmp_path, GPT2))

    assert (model.gated, model.ffn, model.kv_heads, model.head_dim) == (False, 3072, 12, 64)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # one KV head for all query heads, whatever the library's default says of KV heads
        (
            {"model_type": "falcon", "multi_query": True, "num_kv_heads": 71},
            {"kv_heads": 1, "gated": False, "tied": True, "ffn": 4 * 4544},
        ),
        # the newer shape groups its KV heads
        (
            {"multi_query": True, "num_kv_heads": 8, "new_decoder_architecture": True}
            | {"num_attention_heads": 128, "hidden_size": 8192},
            {"kv_heads": 8, "head_dim": 64},
        ),
        ({"model_type": "opt", "ffn_dim": 999, "num_attention_heads": 64}, {"ffn": 999}),
        ({"tie_word_embeddings": False, "model_type": "opt"}, {"tied": False}),
        ({"model_type": "nemotron"}, {"gated": False, "tied": False}),
        ({"model_type": "bloom"}, {"gated": False, "tied": True}),
        ({"model_type": "smollm3"}, {"gated": True, "tied": True}),
        ({"model_type": "openai-gpt"}, {"gated": False, "tied": True}),
        ({"model_type": "ctrl", "dff": 8192}, {"gated": False, "tied": True, "ffn": 8192}),
        ({"model_type": "qwen", "intermediate_size": 22016}, {"gated": True, "ffn": 11008}),
        ({"layer_types": ["full_attention"] * 32}, {"gated": True}),
        ({"sliding_window": None}, {"kv_heads": 71}),
        ({"sliding_window": 4096, "use_sliding_window": False}, {"tied": False}),
    ],
)
def test_hugging_face_families_keep_their_habits(
    tmp_path: Path, config: dict[str, Any], expected: dict[str, Any]
) -> None:
    common = {"model_type": "any", "hidden_size": 4544, "num_hidden_layers": 32}
    common |= {"num_attention_heads": 71, "vocab_size": 65024}
    model = ModelSpec.load(config_file(tmp_path, common | config))

    assert {field: getattr(model, field) for field in expected} == expected


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("num_local_experts", 8, "a mixture of experts"),
        ("n_routed_experts", 256, "a mixture of experts"),
        ("moe_num_experts", 64, "a mixture of experts"),
        ("kv_lora_rank", 512, "latent attention"),
        ("linear_conv_kernel_dim", 4, "linear attention"),
        ("mamba_d_state", 256, "state-space layers"),
        ("lru_width", 2560, "recurrent layers"),
        ("conv_L_cache", 3, "convolution layers"),
        ("sliding_window", 4096, "a sliding window"),
        ("H_cycles", 2, "layers that run several times"),
        ("layer_types", ["linear_attention", "full_attention"], "other kinds of layers"),
        ("block_configs", [{"ffn": {"ffn_mult": 5.25}}], "layers that differ in shape"),
    ],
)
def test_what_the_cost_model_does_not_know_is_refused(
    tmp_path: Path, field: str, value: object, what: str
) -> None:
    shown = {"layer_types": r"\['linear_attention'\]", "block_configs": "given"}.get(field, value)
    with pytest.raises(
        ConfigError, match=f"{field} is {shown}; the cost model doesn't know {what}"
    ):
        ModelSpec.load(config_file(tmp_path, LLAMA | {field: value}))


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"model_type": "bert"}, "model_type is 'bert'"),
        ({"model_type": "xlm-roberta", "is_decoder": False}, "model_type is 'xlm-roberta'"),
        ({"model_type": "distilbert", "dim": 768}, "model_type is 'distilbert'"),
        ({"model_type": "modernbert"}, "model_type is 'modernbert'"),
        ({"model_type": "electra"}, "model_type is 'electra'"),
        ({"model_type": "t5", "is_encoder_decoder": False}, "model_type is 't5'"),
        ({"model_type": "new", "is_encoder_decoder": True}, "is_encoder_decoder is True"),
        ({"model_type": "new", "architectures": ["NewForMaskedLM"]}, "has 'NewForMaskedLM'"),
        ({"model_type": "new", "architectures": ["NewEncoderModel"]}, "has 'NewEncoderModel'"),
    ],
)
def test_encoders_are_refused(tmp_path: Path, config: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=f"{found}.*: no causal decoder"):
        ModelSpec.load(config_file(tmp_path, LLAMA | config))


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "bert", "is_decoder": True},
        {"model_type": "roberta", "architectures": ["RobertaForCausalLM"]},
        {"model_type": "modernbert-decoder"},
        {"is_decoder": False, "is_encoder_decoder": False},  # as whole configurations have it
        {"architectures": ["LlamaForSequenceClassification"]},
        {"architectures": None},
    ],
)
def test_decoders_are_no_encoders(tmp_path: Path, config: dict[str, Any]) -> None:
    assert ModelSpec.load(config_file(tmp_path, LLAMA | config)).layers == 32


def test_the_import_command_prints_a_model_file(tmp_path: Path) -> None:
    printed = CliRunner().invoke(app, ["import", "model", str(config_file(tmp_path, LLAMA))])
    file = tmp_path / "model.yaml"
    file.write_text(printed.stdout, encoding="utf-8")

    assert ModelSpec.load(file) == ModelSpec.load("llama3-8b")


def test_yaml_file_of_the_fields_loads(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("{layers: 2, hidden: 64, heads: 4, ffn: 128, vocab: 99}", encoding="utf-8")

    assert ModelSpec.load(path) == ModelSpec(layers=2, hidden=64, heads=4, ffn=128, vocab=99)


@pytest.mark.parametrize("name", ["llama-8b", "llama3.1-8b"])
def test_unknown_preset_names_those_near_it(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}'; presets near it: llama3-8b"):
        ModelSpec.load(name)


@pytest.mark.parametrize(
    ("change", "needle"),
    [
        ({"num_attention_heads": 30}, "30 query heads do not divide by 8 KV heads"),
        ({"hidden_size": None}, "hidden_size or n_embd is missing"),
        ({"vocab_size": -5}, "vocab is -5"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"hidden_size": 16}, "head_dim is 0"),
        ({"num_attention_heads": 0}, "heads is 0"),
        ({"num_key_value_heads": 0}, "kv_heads is 0"),
        ({"hidden_size": 0}, "hidden is 0"),
        ({"intermediate_size": -1}, "ffn is -1"),
        ({"hidden_size": 10**30, "head_dim": 128}, f"hidden is {10**30}"),
    ],
)
def test_wrong_configurations_name_the_field(
    tmp_path: Path, change: dict[str, Any], needle: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelSpec.load(config_file(tmp_path, LLAMA | change))

    assert needle in str(caught.value)
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_presets_hold_the_shapes_of_the_papers() -> None:
    shapes = {name: (m.layers, m.hidden, m.heads) for name, m in presets().items()}

    assert shapes["30b"] == (60, 6656, 52)
    assert shapes["70b"] == (80, 8192, 64)


def test_a_pass_holds_one_sequence_unless_told_otherwise() -> None:
    assert Workload(100).accumulations == (1, 2, 4, 8)
    packed = Workload(100, global_batch=6, accumulation=2)
    assert (packed.accumulations, packed.step_tokens) == ((2,), 600)


def test_passes_must_be_alike() -> None:
    with pytest.raises(ConfigError, match="global_batch 8 does not divide by accumulation 3"):
        build(Workload, {"seq_len": 10, "accumulation": 3}, "workload")
