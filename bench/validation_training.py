"""What is timed of a plan: a training step of a small decoder, or one of its layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hexiseq_triton.context import ParallelContext
from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.llama import INIT_STD, Block, Llama, LlamaConfig
from hexiseq_triton.module import HexiSeqAttention
from hexiseq_triton.planner import ModelSpec
from hexiseq_triton.rope import rope_tables
from hexiseq_triton.timeline import Timeline
from hexiseq_triton.tracing.layers import record_layers
from hexiseq_triton.tracing.phases import LAYER, STEP
from hexiseq_triton.training_config import TrainingConfig
from hexiseq_triton.training_parts import apply_gradient, make_optimizer

Call = Callable[[], None]


def training_step(context: ParallelContext, spec: ModelSpec, recompute: str) -> Call:
    """Return a whole step as `hexiseq train` takes it, on one document of random tokens.

    Weights are random, other ones on every rank: only their time counts.
    """
    config = TrainingConfig(model="the one given", steps=1, lr=1e-5)
    model = _sharded(LlamaConfig.from_spec(spec), context, recompute=recompute == "full")
    record_layers(model, context.timeline)
    optimizer = make_optimizer(model, config)
    seq_len = context.plan.seq_len
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(spec.vocab, (seq_len,), generator=drawn)
    batch = context.shard(
        {"input_ids": tokens, "labels": tokens}, cu_seqlens=torch.tensor([0, seq_len])
    )
    attend = partial(HexiSeqAttention(context, causal=True), layout=batch.layout)
    span = context.timeline.span

    def call() -> None:
        with span(STEP):
            with span("forward"):
                loss_sum = model(batch["input_ids"], batch.position_ids, attend, batch["labels"])
            mean = context.token_mean(
                loss_sum, batch["labels"].numel(), grad_average=context.plan.world_size
            )
            with span("backward"):
                mean.backward()  # type: ignore[no-untyped-call]
            with span("optimizer"):
                apply_gradient(model, optimizer, config, step=0)
            float(mean.detach())  # on CUDA waits for the device

    return call


def _sharded(config: LlamaConfig, context: ParallelContext, *, recompute: bool) -> Llama:
    mixed = torch.bfloat16 if context.device.type == "cuda" else None
    policy = MixedPrecisionPolicy(
        param_dtype=mixed, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    with torch.device("meta"):
        model = Llama(config, recompute=recompute)
    for block in model.blocks:
        fully_shard(block, mesh=context.mesh, mp_policy=policy)
    fully_shard(model, mesh=context.mesh, mp_policy=policy)
    model.to_empty(device=context.device)
    with torch.no_grad():
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            _fill(parameter.to_local())
    return model


def layer_both_ways(context: ParallelContext, spec: ModelSpec) -> Call:
    """Return forward and backward of one layer over one document, its weights on every rank."""
    plan, device = context.plan, context.device
    if context.replica is None:
        return lambda: None
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = LlamaConfig.from_spec(spec)
    block = Block(config, recompute=False).to(device, dtype)
    with torch.no_grad():
        for parameter in block.parameters():
            _fill(parameter)
    layout = BatchLayout(plan, context.rank, (plan.seq_len,))
    attend = partial(HexiSeqAttention(context, causal=True), layout=layout)
    positions = torch.cat([torch.arange(s.start, s.stop) for s in layout.segments]).to(device)
    rope = rope_tables(positions, config.head_dim, config.rope_theta)
    x = torch.randn(len(positions), config.hidden, device=device, dtype=dtype, requires_grad=True)
    gradient = torch.randn_like(x)
    timeline: Timeline = context.timeline

    def call() -> None:
        x.grad = None
        block.zero_grad()
        with timeline.span(STEP), timeline.span(LAYER):
            block(x, rope, attend).backward(gradient)

    return call


def _fill(parameter: torch.Tensor) -> None:
    if parameter.dim() > 1:
        parameter.normal_(0.0, INIT_STD)
    else:
        parameter.fill_(1.0)
