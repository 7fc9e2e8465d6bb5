"""transformers' models under uneven plans equal themselves, unmodified, in one process."""

from __future__ import annotations

import copy
import inspect
import time
import warnings
from typing import Any

import pytest
import torch
from compiling import counted
from pool import TIMEOUT, Pool
from torch import nn

from hexiseq_triton.context import ParallelContext, init
from hexiseq_triton.errors import InputError, PeerError
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
    "llama4": ("Llama4TextConfig", LLAMA4 | {"attention_chunk_size": 64}),
}
"""Models that equal themselves."""
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
"""Models in which ranks would see their own tokens alone, or turn them differently."""
LENGTHS = [[31, 1, 40, 0, 24], [96], [5, 60, 31]]
"""Documents of three passes, 96 tokens each."""

PLANS = {
    # ranks 1 and 3 have no token, rank 3 no head either; rank 4 is idle
    "uneven": Plan.from_splits(
        [Split((40, 0), (5, 3)), Split((56, 0), (8, 0))], num_kv_heads=2, world_size=5
    ),
    "even": Plan.from_splits(
        [Split((24, 24), (4, 4)), Split((24, 24), (4, 4))], num_kv_heads=2, world_size=5
    ),
}


def small_model(name: str) -> nn.Module:
    """Return a model with random weights, the same in every process."""
    config_name, extra, *_ = CONFIGS.get(name) or REFUSED[name.removeprefix("refused ")]
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


@pytest.fixture(scope="module")
def ready(pool: Pool) -> Pool:
    """The pool, once every process has imported transformers."""
    pool.run(import_all)
    return pool


def stream(lengths: list[int], seed: int) -> dict[str, torch.Tensor]:
    """Return a packed batch [1, T] as a collator makes it: ids, unshifted labels, positions."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, SMALL["vocab_size"], (1, sum(lengths)), generator=generator)
    labels = ids.clone()
    labels[0, ::7] = -100
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def alone(
    model: nn.Module, batches: list[dict[str, torch.Tensor]], lengths: list[list[int]]
) -> dict[str, Any]:
    """Return logits, loss and gradients of one step of the unmodified model in one process.

    Each document runs for itself: not every model keeps packed documents apart.
    """
    documents = []
    for batch, counts in zip(batches, lengths, strict=True):
        parts = (batch[name][0].split(counts) for name in ("input_ids", "labels"))
        documents.append(
            [(ids, labels[1:]) for ids, labels in zip(*parts, strict=True) if len(ids)]
        )
    total = sum(int((labels != -100).sum()) for packed in documents for _, labels in packed)
    logits, loss = [], torch.zeros(())
    for packed in documents:
        found = []
        for ids, labels in packed:
            out = model(ids[None], use_cache=False).logits[0]
            found.append(out.detach())
            part = nn.functional.cross_entropy(out[:-1], labels, reduction="sum") / total
            part.backward()
            loss = loss + part.detach()
        logits.append(torch.cat(found))
    return {"logits": logits, "loss": loss, "grads": gradients(model)}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        found[name.removeprefix("module.")] = grad.detach().clone()
    return found


def wrapped(model: nn.Module, wrapper: str, context: ParallelContext) -> tuple[nn.Module, int]:
    """Return the model in its wrapper, and over how many ranks that averages gradients."""
    if wrapper == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer, mesh=context.mesh)
        return fully_shard(model, mesh=context.mesh), context.mesh.size()
    if wrapper == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        unused = any("sinks" in name or "expert" in name for name, _ in model.named_parameters())
        group = context.world_group
        model = DistributedDataParallel(model, process_group=group, find_unused_parameters=unused)
        return model, context.mesh.size()
    return model, 1


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-12))


def train_step(
    rank: int, plan: Plan, name: str, wrapper: str, num_passes: int, checkpoint: bool = False
) -> dict[str, float]:
    """Worker: one step of a model under a plan; return its largest relative differences."""
    from hexiseq_triton.integrations import hf

    batches = [stream(lengths, seed) for seed, lengths in enumerate(LENGTHS[:num_passes])]
    model = small_model(name)
    expected = alone(copy.deepcopy(model), batches, LENGTHS[:num_passes])
    model.set_attn_implementation("hexiseq")
    if checkpoint:
        model.gradient_checkpointing_enable()
    differences = {"logits": 0.0}
    with init(plan, device="cpu", timeout=TIMEOUT) as context:
        model, grad_average = wrapped(model, wrapper, context)
        shards = [hf.shard(context, batch) for batch in batches]
        num_tokens = sum(batch.num_label_tokens for batch in shards)
        loss = torch.zeros(())
        for batch, whole in zip(shards, expected["logits"], strict=True):
            logits = model(**batch.inputs).logits
            rows = batch.local.layout.num_tokens
            gathered = context.unshard(logits.detach()[0, :rows], batch.local.layout)
            if context.replica is not None:
                differences["logits"] = max(differences["logits"], relative(gathered, whole))
            part = batch.token_mean(logits, grad_average=grad_average, num_tokens=num_tokens)
            part.backward()
            loss += part.detach()
        grads = gradients(model)
        if wrapper == "plain":
            for grad in grads.values():
                torch.distributed.all_reduce(grad)
    differences["loss"] = relative(loss, expected["loss"])
    differences["grads"] = max(
        relative(grads[key], grad) for key, grad in expected["grads"].items()
    )
    return differences


def assert_equal(found: list[dict[str, float]]) -> None:
    for rank, differences in enumerate(found):
        assert all(value < 1e-5 for value in differences.values()), (rank, differences)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_equals_itself_in_one_process(ready: Pool, name: str) -> None:
    assert_equal(ready.run(train_step, PLANS["uneven"], name, "plain", 1))


@pytest.mark.parametrize("num_passes", [1, 3])
@pytest.mark.parametrize("wrapper", ["plain", "fsdp2", "ddp"])
def test_every_wrapper_and_accumulation(ready: Pool, wrapper: str, num_passes: int) -> None:
    for name in ("llama", "qwen3", "mistral"):
        assert_equal(ready.run(train_step, PLANS["uneven"], name, wrapper, num_passes))


def test_checkpointed_layers_attend_again(ready: Pool) -> None:
    assert_equal(ready.run(train_step, PLANS["even"], "llama", "fsdp2", 1, True))


def perturbed(rank: int, plan: Plan) -> bool:
    """Worker: whether document B's logits stay the same bits when document A changes."""
    from hexiseq_triton.integrations import hf

    model = small_model("llama")
    model.set_attn_implementation("hexiseq")
    batch = stream([50, 46], 0)
    other = copy.deepcopy(batch)
    other["input_ids"][0, :50] = 1
    with init(plan, device="cpu", timeout=TIMEOUT) as context, torch.no_grad():
        found = []
        for each in (batch, other):
            local = hf.shard(context, each)
            logits = model(**local.inputs).logits[0, : local.local.layout.num_tokens]
            found.append(context.unshard(logits, local.local.layout)[50:])
    return torch.equal(*found)


def test_documents_do_not_touch_each_other(ready: Pool) -> None:
    assert all(ready.run(perturbed, PLANS["uneven"]))


def two_plans(rank: int) -> float:
    """Worker: two contexts take turns; return the logits' difference."""
    from hexiseq_triton.integrations import hf

    model = small_model("llama")
    batch = stream(LENGTHS[0], 0)
    with torch.no_grad():
        documents = batch["input_ids"].split(LENGTHS[0], dim=1)
        expected = torch.cat(
            [model(ids, use_cache=False).logits[0] for ids in documents if len(ids[0])]
        )
        model.set_attn_implementation("hexiseq")
        worst = 0.0
        with (
            init(PLANS["uneven"], device="cpu", timeout=TIMEOUT) as first,
            init(PLANS["even"], device="cpu", timeout=TIMEOUT) as second,
        ):
            shards = [hf.shard(context, batch) for context in (first, second)]
            for local in (*shards, *reversed(shards)):
                logits = model(**local.inputs).logits[0, : local.local.layout.num_tokens]
                whole = local.context.unshard(logits, local.local.layout)
                if local.context.replica is not None:
                    worst = max(worst, relative(whole, expected))
    return worst


def test_two_contexts_take_turns(ready: Pool) -> None:
    assert max(ready.run(two_plans)) < 1e-5


def autocast(rank: int) -> float:
    """Worker: how far logits under autocast are from those in float32."""
    from hexiseq_triton.integrations import hf

    model = small_model("llama")
    model.set_attn_implementation("hexiseq")
    with torch.no_grad():
        found = []
        for enabled in (False, True):  # a context keeps its dtype
            with init(PLANS["even"], device="cpu", timeout=TIMEOUT) as context:
                batch = hf.shard(context, stream(LENGTHS[0], 0))
                with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                    found.append(model(**batch.inputs).logits.float())
    return relative(found[1], found[0])


def test_autocast_attends_in_its_dtype(ready: Pool) -> None:
    found = ready.run(autocast)
    assert all(0.0 < each < 0.05 for each in found[:4]), found  # rank 4 is idle


def compiled(rank: int) -> tuple[float, dict[str, int], int]:
    """Worker: what compiling a model changes where its rank is alone; graph breaks, and graphs."""
    from hexiseq_triton.integrations import hf

    model = small_model("llama")
    model.set_attn_implementation("hexiseq")
    alone = Plan.from_splits([Split((96,), (8,))], *[[Split((96,), (8,))]] * 4, num_kv_heads=2)
    with init(alone, device="cpu", timeout=TIMEOUT) as context:
        if rank > 0:
            return 0.0, {}, 1
        inputs = hf.shard(context, stream([40, 56], 0)).inputs
        expected = model(**inputs).logits
        with counted() as counters:
            found = torch.compile(model, backend="aot_eager")(**inputs).logits
            breaks, graphs = dict(counters["graph_break"]), counters["stats"]["unique_graphs"]
    return relative(found, expected), breaks, graphs


def test_a_model_alone_compiles_whole(ready: Pool) -> None:
    difference, breaks, graphs = ready.run(compiled)[0]
    assert difference < 1e-5
    assert breaks == {}
    assert graphs == 1


def document_sources(rank: int) -> list[list[int]]:
    """Worker: the document lengths found from each thing a collator may tell them by."""
    from hexiseq_triton.integrations import hf

    batch = stream(LENGTHS[2], 0)
    ids = {"input_ids": batch["input_ids"]}
    bounds = torch.tensor([0, *LENGTHS[2]]).cumsum(0)
    with init(PLANS["even"], device="cpu", timeout=TIMEOUT) as context:
        told = [
            hf.shard(context, ids, cu_seqlens=bounds),
            hf.shard(context, ids | {"cu_seq_lens_q": bounds[None].int()}),
            hf.shard(context, ids | {"position_ids": batch["position_ids"]}),
            hf.shard(context, ids | {"attention_mask": torch.ones(1, 96)}),
        ]
        return [list(each.local.layout.document_lengths) for each in told]


def test_documents_come_from_what_the_collator_tells(ready: Pool) -> None:
    found = ready.run(document_sources)[0]
    assert found == [LENGTHS[2], LENGTHS[2], LENGTHS[2], [96]]


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


def refused_model(rank: int, name: str) -> str:
    """Worker: what a forward pass of a model raises, or the loss made of it."""
    from hexiseq_triton.integrations import hf

    model = small_model(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name != "llama":  # which stands for what was forgotten
            model.set_attn_implementation("hexiseq")
    with init(PLANS["uneven"], device="cpu", timeout=TIMEOUT) as context:
        batch = hf.shard(context, stream(LENGTHS[2], 0))
        try:
            logits = model(**batch.inputs).logits
            if context.replica is not None or not batch._calls.attended:
                batch.token_mean(logits, grad_average=1)
        except InputError as error:
            return str(error)
    return "accepted"


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_would_not_equal_itself_is_refused(ready: Pool, name: str) -> None:
    for found in ready.run(refused_model, f"refused {name}")[:4]:
        assert REFUSED[name][2] in found


def test_an_attention_that_was_not_chosen_is_named(ready: Pool) -> None:
    for found in ready.run(refused_model, "llama"):
        assert "call model.set_attn_implementation('hexiseq')" in found


def misfit(rank: int, extra: dict[str, Any], dropped: str) -> str:
    """Worker: what a batch raises with more in it than tensors of its tokens, or with less."""
    from hexiseq_triton.integrations import hf

    batch = {"input_ids": torch.ones(2, 48).long(), "labels": torch.ones(2, 48).long()} | extra
    batch.pop(dropped, None)
    with init(PLANS["even"], device="cpu", timeout=TIMEOUT) as context:
        try:
            return str(hf.shard(context, batch).num_label_tokens)
        except InputError as error:
            return str(error)


@pytest.mark.parametrize(
    ("extra", "dropped", "message"),
    [
        ({"text": ["a", "b"]}, "", "text is a list, not a tensor of the tokens"),
        ({"sample": torch.ones(2)}, "", "sample has shape (2,); it must begin with"),
        ({"token_type_ids": torch.ones(2, 48)}, "", "token_type_ids are not all 0"),
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
        assert found.startswith("rank 1: ")
        assert "attention_mask hides tokens; pack the documents without padding" in found
