"""The decoder and its loss, in one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hexiseq_triton.errors import ConfigError
from hexiseq_triton.llama import Llama, LlamaConfig, initialize
from hexiseq_triton.planner import Plan, Split
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.single import SingleProcessTraining, dense_attention
from hexiseq_triton.training_config import TrainingConfig

SHAPE = LlamaConfig(layers=2, hidden=24, heads=6, kv_heads=2, head_dim=8, ffn=40, vocab=31)
TIED = LlamaConfig(layers=1, hidden=24, heads=6, kv_heads=2, ffn=40, vocab=31, tied=True)


def made(config: LlamaConfig = SHAPE) -> Llama:
    model = Llama(config)
    initialize(model, seed=3)
    return model


def test_first_values_do_not_depend_on_the_default_device() -> None:
    model = Llama(SHAPE)
    with torch.device("meta"):
        initialize(model, seed=3)
    for found, expected in zip(model.parameters(), made().parameters(), strict=True):
        assert torch.equal(found, expected)


def test_one_process_trains_alike_under_another_default_device() -> None:
    plan = Plan.from_splits([Split((64,), (8,))], num_kv_heads=4)
    config = TrainingConfig(model="tiny", steps=1, lr=1e-3)
    training = SingleProcessTraining(plan, config, "cpu")
    expected = training.backward()
    with torch.device("meta"):
        assert training.backward() == expected


def logits(model: Llama, tokens: torch.Tensor, lengths: list[int], shift: int = 0) -> torch.Tensor:
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    positions = torch.cat([torch.arange(length) for length in lengths]) + shift
    return model(tokens, positions, dense_attention(bounds))


def random_tokens(count: int) -> torch.Tensor:
    return torch.randint(0, 31, (count,), generator=torch.Generator().manual_seed(0))


def test_a_packed_document_gets_the_logits_it_gets_alone() -> None:
    model, tokens = made(), random_tokens(20)

    packed = logits(model, tokens, [7, 1, 12])

    torch.testing.assert_close(packed[8:], logits(model, tokens[8:], [12]))


def test_a_token_sees_no_token_after_it() -> None:
    model, tokens = made(), random_tokens(12)
    changed = tokens.clone()
    changed[8] = (tokens[8] + 1) % 31

    before, after = logits(model, tokens, [12]), logits(model, changed, [12])

    torch.testing.assert_close(before[:8], after[:8])
    assert (before[8:] - after[8:]).abs().amin(dim=0).max() > 1e-4


def test_only_distances_between_positions_count() -> None:
    model, tokens = made(), random_tokens(12)

    shifted = logits(model, tokens, [12], shift=50)

    torch.testing.assert_close(shifted, logits(model, tokens, [12]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", [SHAPE, TIED], ids=["untied", "tied"])
def test_the_loss_is_the_summed_cross_entropy_of_the_logits(config: LlamaConfig) -> None:
    model, tokens = made(config), random_tokens(12)
    labels = tokens.roll(-1)
    labels[[4, 11]] = -100
    attend = dense_attention([0, 12])

    loss = model(tokens, torch.arange(12), attend, labels)
    found = torch.autograd.grad(loss, list(model.parameters()))

    expected = F.cross_entropy(logits(model, tokens, [12]), labels, reduction="sum")
    torch.testing.assert_close(loss, expected)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    torch.testing.assert_close(found, wanted)


def test_a_tied_model_has_no_output_matrix_of_its_own() -> None:
    assert TIED.parameters == sum(p.numel() for p in Llama(TIED).parameters())
    assert SHAPE.parameters == sum(p.numel() for p in Llama(SHAPE).parameters())


@pytest.mark.parametrize("config", [SHAPE, TIED], ids=["untied", "tied"])
def test_no_rows_give_loss_zero_and_zero_gradients_everywhere(config: LlamaConfig) -> None:
    model = made(config)
    none = torch.empty(0, dtype=torch.int64)

    loss = model(none, none, lambda q, k, v: q + 0 * (k.sum() + v.sum()), none)
    loss.backward()

    assert loss == 0.0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    first, second, other = Llama(SHAPE), Llama(SHAPE), Llama(SHAPE)
    initialize(first, seed=1)
    torch.rand(5)  # the global stream has no part in it
    initialize(second, seed=1)
    initialize(other, seed=2)

    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.embedding.weight, other.embedding.weight)
    q, k = first.blocks[0].attention.q.weight, first.blocks[1].attention.q.weight
    assert not torch.equal(q, k)


def test_a_shape_with_a_plain_mlp_is_refused() -> None:
    with pytest.raises(ConfigError, match="gated: false"):
        LlamaConfig.from_spec(ModelSpec.load("7b"))
