"""HexiSeqAttention as models treat a module: copied, built on "meta", under a default device."""

from __future__ import annotations

import copy
import pickle

import torch
from aligned import aligned_attention
from pool import TIMEOUT, Pool
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel

from hexiseq_triton.context import ParallelContext, init
from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.module import HexiSeqAttention
from hexiseq_triton.planner import Plan, Split

PLAN = Plan.from_splits(
    [Split((10, 0, 5), (1, 2, 1)), Split((9,), (4,))], num_kv_heads=2, world_size=5
)
X = torch.randn(24, 16, generator=torch.Generator().manual_seed(0))
BOUNDS = torch.tensor([0, 9, 9, 24])


class Layer(nn.Module):
    """One attention with a sink between two projections."""

    def __init__(self, context: ParallelContext) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 64), nn.Linear(32, 16)
        self.attention = HexiSeqAttention(context, causal=True, learnable_sink=True)

    def forward(self, x: torch.Tensor, layout: BatchLayout) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (8, 8)).split((4, 2, 2), dim=1)
        out: torch.Tensor = self.out(self.attention(q, k, v, layout).flatten(1))
        return out


def averaged(rank: int) -> bool:
    """Worker: whether an average of a model's weights computes as the model does."""
    with init(PLAN, device="cpu", timeout=TIMEOUT) as context:
        model = Layer(context)
        average = AveragedModel(model)
        batch = context.shard({"x": X}, cu_seqlens=BOUNDS)
        found = [each(batch["x"], batch.layout) for each in (model, average)]
        shared = average.module.attention.sink is model.attention.sink
        return torch.equal(*found) and not shared and copy.deepcopy(context) is context


def test_a_copy_of_a_model_attends_in_the_same_context(pool: Pool) -> None:
    torch.manual_seed(0)
    assert pool.run(averaged) == [True] * 5


def pickled(rank: int) -> None:
    """Worker: pickle a whole model."""
    with init(PLAN, device="cpu", timeout=TIMEOUT) as context:
        pickle.dumps(Layer(context))


def test_a_whole_model_is_not_pickled_and_the_error_says_what_is(pool: Pool) -> None:
    for outcome in pool.outcomes(pickled):
        assert outcome.kind == "InputError"
        assert "save model.state_dict() and not the model" in outcome.error


def built_on_meta(rank: int) -> tuple[str, list[float], float]:
    """Worker: shard a model before it has memory; return its device, first sink, and a loss."""
    with init(PLAN, device="cpu", timeout=TIMEOUT) as context:
        with torch.device("meta"):
            model = Layer(context)
        device = model.attention.sink.device.type
        fully_shard(model, mesh=context.mesh)
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.use_deterministic_algorithms(True)
        model.to_empty(device="cpu")  # NaN
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        batch = context.shard({"x": X}, cu_seqlens=BOUNDS)
        sink = model.attention.sink.full_tensor().tolist()
        loss = model(batch["x"], batch.layout).square().sum()
        return device, sink, float(context.token_mean(loss.detach(), 24, grad_average=1))


def test_a_model_on_meta_gets_its_sink_with_its_other_parameters(pool: Pool) -> None:
    for device, sink, loss in pool.run(built_on_meta):
        assert device == "meta"
        assert sink == [0.0] * 4
        assert 0.0 < loss < 10.0


def under_default_device(rank: int, device: str | None) -> list[torch.Tensor]:
    """Worker: return the rows and outputs of a batch where new tensors go to `device`."""
    torch.set_default_device(device)
    try:
        with init(PLAN, device="cpu", timeout=TIMEOUT) as context:
            q = torch.linspace(-1, 1, 24 * 32, device="cpu").view(24, 4, 8)
            bounds = torch.tensor([0, 9, 9, 24], device="cpu")
            labels = torch.arange(24, device="cpu")
            batch = context.shard({"q": q, "labels": labels}, cu_seqlens=bounds)
            q = batch["q"].requires_grad_()
            o = HexiSeqAttention(context, causal=True)(q, q[:, :2], q[:, 2:], batch.layout)
            loss = context.token_mean(o.square().sum(), 24, grad_average=1)
            loss.backward()
            whole = context.unshard(o.detach(), batch.layout)
            return [batch["labels"], batch.position_ids, batch.cu_seqlens, whole, q.grad]
    finally:
        torch.set_default_device(None)


def test_another_default_device_changes_nothing(pool: Pool) -> None:
    expected = pool.run(under_default_device, None)
    for found, usual in zip(pool.run(under_default_device, "meta"), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, usual, strict=True))


def with_values_of(rank: int, width: int) -> list[torch.Tensor]:
    """Worker: return output and gradients where values are narrower than keys, and the inputs."""
    draw = torch.Generator().manual_seed(1)
    whole = {
        name: torch.randn(24, heads, size, generator=draw, dtype=torch.float64)
        for name, heads, size in (("q", 4, 8), ("k", 2, 8), ("v", 2, width), ("do", 4, width))
    }
    with init(PLAN, device="cpu", timeout=TIMEOUT) as context:
        batch = context.shard(whole, cu_seqlens=BOUNDS)
        q, k, v = (batch[name].requires_grad_() for name in "qkv")
        o = HexiSeqAttention(context, causal=True)(q, k, v, batch.layout)
        o.backward(batch["do"])
        found = [context.unshard(x.detach(), batch.layout) for x in (o, q.grad, k.grad, v.grad)]
        return found + list(whole.values())


def test_values_narrower_than_keys_equal_dense_attention(pool: Pool) -> None:
    *_, (*found, q, k, v, do) = pool.run(with_values_of, 5)[:-1]  # the last rank is idle
    inputs = [x.requires_grad_() for x in (q, k, v)]
    lengths = [9, 0, 15]
    out, _ = aligned_attention(*inputs, lengths, lengths, causal=True)
    expected = (out, *torch.autograd.grad(out, inputs, do))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def with_width_of_rank(rank: int) -> None:
    """Worker: rank 0 alone has narrower values."""
    with init(PLAN, device="cpu", timeout=TIMEOUT) as context:
        batch = context.shard({"x": torch.ones(24, 6, 8)}, cu_seqlens=BOUNDS)
        q, k = batch["x"][:, :4], batch["x"][:, 4:]
        v = k[..., :5] if rank == 0 else k
        HexiSeqAttention(context, causal=True)(q, k, v, batch.layout)


def test_ranks_whose_values_differ_in_width_say_so(pool: Pool) -> None:
    for outcome in pool.outcomes(with_width_of_rank)[:3]:  # those of rank 0's replica
        assert outcome.kind == "InputError"
        assert "values of 5" in outcome.error
