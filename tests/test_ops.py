"""The operators under torch.compile, opcheck, fake tensors and activation checkpointing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import hexiseq_triton as hx
import hexiseq_triton.kernels.ops  # registers the operators
from hexiseq_triton.kernels.attention import by_reference
from hexiseq_triton.kernels.options import state_dtype

FORWARD = torch.ops.hexiseq_triton.attention_forward.default
BACKWARD = torch.ops.hexiseq_triton.attention_backward.default
OPTIONS = (7, 0, 0.3, 1.5, True)  # left, right, softmax_scale, softcap, deterministic
LENGTHS = (1, 127, 128, 129, 196, 257)

# importing inductor defines a ScriptModule, which PyTorch itself deprecates
inductor_imports_torch_jit = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class LocalAttention(torch.nn.Module):
    """A block as a user would write it: projection, local attention with a sink, projection."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sink = torch.nn.Parameter(torch.tensor([0.5, -0.3]))
        self.qkv = torch.nn.Linear(16, 32)
        self.out = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor, longest: int) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (4, 8)).split([2, 1, 1], dim=1)
        o = hx.flash_attn_varlen_func(
            q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True,
            learnable_sink=self.sink,
        )  # fmt: skip
        return self.out(o.flatten(1))


class DenseAttention(torch.nn.Module):
    """The same over sequences of equal length, with lse."""

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        o, lse, _ = hx.flash_attn_func(q, k, k, causal=True, return_attn_probs=True)
        return o * torch.sigmoid(lse).transpose(1, 2)[..., None]


class OpLog(TorchDispatchMode):
    """Counts the calls of the two operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = {FORWARD: 0, BACKWARD: 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.calls:
            self.calls[func] += 1
        return func(*args, **(kwargs or {}))


def forward_inputs(num_q: int, num_k: int, sink: bool = False, **kind: Any) -> list[Any]:
    """Return the arguments of the forward operator for two documents."""
    torch.manual_seed(0)
    q = torch.randn(4, num_q, 8, **kind).transpose(0, 1)  # strided views
    k, v = torch.randn(num_k, 2, 2, 8, **kind).unbind(1)
    cu_q, cu_k = (torch.tensor([0, n // 3, n], dtype=torch.int32) for n in (num_q, num_k))
    logits = torch.randn(4, dtype=state_dtype(q.dtype)) if sink else None
    return [q, k, v, logits, cu_q, cu_k, num_q, None, *OPTIONS]


def backward_inputs(forward: list[Any]) -> list[Any]:
    """Return the arguments of the backward operator that follow from those of forward."""
    out, lse = FORWARD(*forward)
    return [torch.randn_like(out), None, *forward[:4], out, lse, *forward[4:6], *OPTIONS]


def documents_of(*lengths: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return x, cu_seqlens and the largest length."""
    torch.manual_seed(1)
    return torch.randn(sum(lengths), 16), torch.tensor([0, *lengths]).cumsum(0), max(lengths)


def outcome(call: Any, module: torch.nn.Module, *inputs: Any) -> list[torch.Tensor]:
    """Return the output of `call` and the gradients of the parameters and inputs."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) if torch.is_tensor(x) else x
              for x in inputs]  # fmt: skip
    out = call(*leaves)
    wanted = [*module.parameters(), *(x for x in leaves if torch.is_tensor(x) and x.requires_grad)]
    return [out, *torch.autograd.grad(out.square().sum(), wanted)]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize(("num_q", "num_k"), [(1, 1), (129, 60), (5, 0)])
def test_opcheck_passes(num_q: int, num_k: int, sink: bool) -> None:
    inputs = forward_inputs(num_q, num_k, sink)
    torch.library.opcheck(BACKWARD, backward_inputs(inputs))
    leaves = [None if x is None else x.requires_grad_() for x in inputs[:4]]
    torch.library.opcheck(FORWARD, leaves + inputs[4:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_fake_results_are_laid_out_as_real_ones(num_tokens: int, dtype: torch.dtype) -> None:
    inputs = forward_inputs(num_tokens, num_tokens, sink=num_tokens % 2 == 0, dtype=dtype)
    grad_inputs = backward_inputs(inputs)
    with FakeTensorMode() as mode:
        fake = [[mode.from_tensor(x) if torch.is_tensor(x) else x for x in args]
                for args in (inputs, grad_inputs)]  # fmt: skip
        fakes = [*FORWARD(*fake[0]), *BACKWARD(*fake[1])]
    for a, b in zip(fakes, [*FORWARD(*inputs), *BACKWARD(*grad_inputs)], strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        assert b.is_contiguous()


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_module_has_one_graph_for_all_documents() -> None:
    module = LocalAttention()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ((5, 7), (8, 4), (2, 127), (2, 128), (196, 61)):
            inputs = documents_of(*lengths)
            assert_same(outcome(compiled, module, *inputs), outcome(module, module, *inputs))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_a_compiled_module_works_at_static_lengths(num_tokens: int) -> None:
    module = LocalAttention()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=False)
    inputs = documents_of(num_tokens)
    assert_same(outcome(compiled, module, *inputs), outcome(module, module, *inputs))


@pytest.mark.usefixtures("fresh_compiler")
def test_dense_attention_compiles_with_its_lse() -> None:
    torch.manual_seed(0)
    module = DenseAttention()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for seq_q in (3, 9):
        inputs = torch.randn(2, seq_q, 4, 8), torch.randn(2, 5, 2, 8)
        assert_same(outcome(compiled, module, *inputs), outcome(module, module, *inputs))


@inductor_imports_torch_jit
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler on the CPU")
def test_inductor_compiles_forward_and_backward() -> None:
    module = LocalAttention()
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    inputs = documents_of(5, 7)
    with torch._inductor.config.patch(compile_threads=1):
        assert_same(outcome(compiled, module, *inputs), outcome(module, module, *inputs))


@inductor_imports_torch_jit
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # advice, not wanted here
@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_inductor_compiles_around_the_gpu_kernels() -> None:
    module = LocalAttention().cuda()
    x, cu_seqlens, longest = documents_of(5, 7)
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    inputs = x.cuda(), cu_seqlens.cuda(), longest
    found, expected = outcome(compiled, module, *inputs), outcome(module, module, *inputs)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)  # TF32 in the projections


@inductor_imports_torch_jit
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # advice, not wanted here
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # of a warm-up of PyTorch's
@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_cuda_graphs_of_a_compiled_module_follow_the_documents(device: str) -> None:
    module = LocalAttention().cuda()
    compiled = torch.compile(module, mode="reduce-overhead")
    for lengths in ((5, 7), (5, 7), (5, 7), (2, 10), (11, 1)):
        x, cu_seqlens, _ = documents_of(*lengths)
        inputs = x.cuda(), cu_seqlens.to(device), 12
        found, expected = outcome(compiled, module, *inputs), outcome(module, module, *inputs)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)  # TF32 in the projections


def test_inductor_leaves_the_operators_out_of_cuda_graphs() -> None:
    assert all(torch.Tag.cudagraph_unsafe in op.tags for op in (FORWARD, BACKWARD))


@pytest.mark.parametrize(
    ("policy", "forward_calls"),
    [(None, 2), (CheckpointPolicy.MUST_RECOMPUTE, 2), (CheckpointPolicy.MUST_SAVE, 1)],
)
def test_checkpointing_recomputes_or_keeps_attention(
    policy: CheckpointPolicy | None, forward_calls: int
) -> None:
    module, inputs = LocalAttention(), documents_of(5, 7, 1)

    def choose(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return policy if op == FORWARD else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = {}
    if policy is not None:
        contexts["context_fn"] = partial(create_selective_checkpoint_contexts, choose)
    saving = partial(checkpoint, module, use_reentrant=False, **contexts)
    with OpLog() as log:
        found = outcome(saving, module, *inputs)
    assert log.calls == {FORWARD: forward_calls, BACKWARD: 1}
    assert_same(found, outcome(module, module, *inputs))


def test_a_second_derivative_raises() -> None:
    q, k, v, *rest = forward_inputs(4, 4)
    out, _ = FORWARD(q.requires_grad_(), k, v, *rest)
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"attention_backward.*no autograd formula"):
        dq.sum().backward()


def test_no_gradient_without_need() -> None:
    q, k, v, *rest = forward_inputs(4, 4)
    with torch.no_grad():
        assert not FORWARD(q.requires_grad_(), k, v, *rest)[0].requires_grad
    with torch.inference_mode():
        assert FORWARD(q, k, v, *rest)[0].is_inference()


def test_offsets_are_read_at_each_call() -> None:
    """An array that shares the memory changes it behind PyTorch's back, as collectives do."""
    q, k, v, sink, cu_seqlens, *rest = forward_inputs(4, 4)
    cu_seqlens = cu_seqlens.clone()
    rest[0] = cu_seqlens
    first, _ = FORWARD(q, k, v, sink, cu_seqlens, *rest)
    cu_seqlens.numpy()[1] = 3
    second, _ = FORWARD(q, k, v, sink, cu_seqlens, *rest)
    expected, _ = FORWARD(q, k, v, sink, cu_seqlens.clone(), *rest)
    assert not torch.equal(first, second)
    assert torch.equal(second, expected)


def test_other_devices_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="q is on meta; supported: cpu and cuda"):
        by_reference(torch.empty(0, device="meta"))
