"""transformers' models under uneven plans equal themselves, unmodified, in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from compiling import counted
from pool import TIMEOUT, Pool
from small_models import CONFIGS, LENGTHS, PLANS, SMALL, small_model, stream
from torch import nn

from hexiseq_triton.context import ParallelContext, init
from hexiseq_triton.planner import Plan, Split


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
    groups = SMALL | CONFIGS[name][1]
    plan = "uneven" if groups["num_key_value_heads"] == 2 else "a KV head for each query head"
    assert_equal(ready.run(train_step, PLANS[plan], name, "plain", 1))


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


def compiled_with_others(rank: int) -> tuple[list[float], list[int]]:
    """Worker: what compiling changes under an uneven plan, and the graphs after each batch."""
    from hexiseq_triton.integrations import hf

    model = small_model("llama")
    model.set_attn_implementation("hexiseq")
    differences, graphs = [], []
    with init(PLANS["uneven"], device="cpu", timeout=TIMEOUT) as context, counted() as counters:
        fast = torch.compile(model, backend="eager", dynamic=True)
        for cut in (40, 41, 17, 90):
            inputs = hf.shard(context, stream([cut, 96 - cut], 0)).inputs
            found = []
            for call in (fast, model):
                model.zero_grad()
                logits = call(**inputs).logits
                logits.square().mean().backward()
                found += [logits.detach(), model.lm_head.weight.grad.clone()]
            differences += [relative(found[0], found[2]), relative(found[1], found[3])]
            graphs.append(counters["stats"]["unique_graphs"])
    return differences, graphs


def test_the_compiler_passes_over_the_exchange(ready: Pool) -> None:
    """Or each batch, of other lengths, would have it compiled anew for minutes."""
    for differences, graphs in ready.run(compiled_with_others)[:4]:
        assert max(differences) < 1e-5
        assert len(set(graphs)) == 1


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
            hf.shard(context, {"input_ids": ids["input_ids"].view(2, 48)}),
            hf.shard(
                context,
                {
                    "input_ids": ids["input_ids"].view(2, 48),
                    "position_ids": torch.arange(48)[None],
                },
            ),
        ]
        return [list(each.local.layout.document_lengths) for each in told]


def test_documents_come_from_what_the_collator_tells(ready: Pool) -> None:
    found = ready.run(document_sources)[0]
    assert found == [LENGTHS[2], LENGTHS[2], LENGTHS[2], [96], [48, 48], [48, 48]]
