"""What a run trains: model, documents and optimizer, checked against the plan and other ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hexiseq_triton.agreement import listed
from hexiseq_triton.context import ParallelContext
from hexiseq_triton.corpus import VOCAB, Corpus
from hexiseq_triton.errors import ConfigError
from hexiseq_triton.llama import Llama, LlamaConfig, initialize
from hexiseq_triton.planner import Plan
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.tracing.record import is_of_another_model
from hexiseq_triton.training_config import TrainingConfig

_OF_A_NODE = {"out", "timeout_seconds"}
"""Fields of a configuration in which ranks may differ."""


def model_config(config: TrainingConfig, plan: Plan) -> LlamaConfig:
    """Return the decoder to train, checked against the plan and the corpus.

    Raises:
        ConfigError: naming what differs.
    """
    shape = LlamaConfig.from_spec(ModelSpec.load(config.model), rope_theta=config.rope_theta)
    heads = (plan.num_heads, plan.num_kv_heads, plan.head_dim or shape.head_dim)
    if (shape.heads, shape.kv_heads, shape.head_dim) != heads:
        raise ConfigError(
            f"model {config.model} has {shape.heads} query heads, {shape.kv_heads} KV heads and "
            f"head_dim {shape.head_dim}; the plan is for {heads[0]}, {heads[1]} and {heads[2]}"
        )
    if not plan.causal:
        raise ConfigError("the plan is for full attention; a decoder needs one with causal: true")
    if shape.vocab < VOCAB:
        raise ConfigError(
            f"model {config.model} has vocab {shape.vocab}; bytes as tokens need {VOCAB} or more"
        )
    return shape


def agree_on_run(
    context: ParallelContext, config: TrainingConfig, shape: LlamaConfig, corpus: Corpus
) -> None:
    """Let all ranks raise the same error, or train the same model alike on the same documents.

    Where files are, and how long to wait, is each node's own affair.
    """
    own = {name: x for name, x in asdict(config).items() if name not in _OF_A_NODE}
    own |= {"model": asdict(shape), "corpus": corpus.digest}
    answers = [json.loads(answer) for answer in context.gather("run", json.dumps(own))]
    differ = [name for name in own if any(answer[name] != own[name] for answer in answers)]
    if differ:
        held = [", ".join(f"{name} {answer[name]}" for name in differ) for answer in answers]
        raise ConfigError(
            "ranks train differently; give all the same training file, model and documents\n"
            f"{listed(range(len(held)), held)}"
        )


def make_corpus(config: TrainingConfig) -> Corpus:
    """Return the corpus that the configuration names."""
    options = config.corpus
    return Corpus(
        options.folder,
        pattern=options.pattern,
        max_document_tokens=options.max_document_tokens,
        seed=config.seed,
    )


def remarks(plan: Plan, config: TrainingConfig, corpus: Corpus) -> Iterator[str]:
    """Yield what to know of a run before it begins, a sentence each."""
    tokens = plan.global_batch * plan.seq_len
    if corpus.num_tokens < tokens:
        yield (
            f"a step takes {tokens} tokens, and the corpus has {corpus.num_tokens}: each step "
            "repeats documents"
        )
    if is_of_another_model(plan, ModelSpec.load(config.model)):
        yield (
            f"the plan was made for another model than {config.model}, with the same heads, but "
            "other layers, widths or vocabulary: its times and memory are not this model's, which "
            "may run out of memory; plan again for this one"
        )


def sharded_model(shape: LlamaConfig, context: ParallelContext, config: TrainingConfig) -> Llama:
    """Return the initialised model, whose parameters exist as shards only."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if config.dtype == "bf16" else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # rotary tables stay float32
    )
    recompute = config.recompute or context.plan.recompute or "full"
    with torch.device("meta"):
        model = Llama(shape, recompute=recompute == "full")
    for block in model.blocks:
        fully_shard(block, mesh=context.mesh, mp_policy=policy)
    fully_shard(model, mesh=context.mesh, mp_policy=policy)
    model.to_empty(device=context.device)
    initialize(model, config.seed)
    return model


def make_optimizer(model: Llama, config: TrainingConfig) -> torch.optim.AdamW:
    """Return AdamW; weight decay acts on matrices and not on norms."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)


def apply_gradient(
    model: Llama, optimizer: torch.optim.AdamW, config: TrainingConfig, step: int
) -> None:
    """Clip the gradient if asked to, take optimizer step number `step`, and drop the gradient."""
    if config.max_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = config.lr_at(step)
    optimizer.step()
    optimizer.zero_grad()
