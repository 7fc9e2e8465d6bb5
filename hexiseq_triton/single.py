"""The same run in one process: the oracle that a distributed run is held against.

It takes the same weights and sequences, and shares the decoder and the optimizer. Everything that
a plan touches is done another way: attention is dense, one document at a time, by PyTorch; labels,
positions and the mean are made from whole documents; there is no torch.distributed and no FSDP.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F

from hexiseq_triton.corpus import Pack, sequences_of
from hexiseq_triton.llama import Attend, Llama, initialize
from hexiseq_triton.planner import Plan
from hexiseq_triton.shard import IGNORED_LABEL
from hexiseq_triton.training_config import TrainingConfig
from hexiseq_triton.training_parts import (
    apply_gradient,
    make_corpus,
    make_optimizer,
    model_config,
)


class SingleProcessTraining:
    """Trains on the whole global batch of a plan, in this process alone."""

    def __init__(self, plan: Plan, config: TrainingConfig, device: torch.device | str) -> None:
        self.plan = plan
        self.config = config
        self.device = torch.device(device)
        self.corpus = make_corpus(config)
        self.model = Llama(model_config(config, plan)).to(self.device)
        initialize(self.model, config.seed)
        self.optimizer = make_optimizer(self.model, config)
        self.steps_done = 0

    def step(self) -> float:
        """Take one optimizer step; return its mean loss in nats."""
        loss = self.backward()
        self.update()
        return loss

    def backward(self) -> float:
        """Leave the step's gradient in the parameters; return its mean loss in nats."""
        packs = [
            self.corpus.sequences(
                sequences_of(self.plan, replica, self.steps_done, turn), self.plan.seq_len
            )
            for turn in range(self.plan.accumulation)
            for replica in range(len(self.plan.replicas))
        ]
        # every token of a document but the first is predicted
        num_tokens = sum(
            max(stop - start - 1, 0) for pack in packs for start, stop in pairwise(_bounds(pack))
        )
        total = 0.0
        for pack in packs:
            mean = self._loss_sum(pack) / max(num_tokens, 1)
            mean.backward()
            total += float(mean.detach())
        return total

    def update(self) -> None:
        """Apply the gradient and forget it."""
        apply_gradient(self.model, self.optimizer, self.config, self.steps_done)
        self.steps_done += 1

    def _loss_sum(self, pack: Pack) -> torch.Tensor:
        bounds = _bounds(pack)
        documents = [pack.tokens[start:stop] for start, stop in pairwise(bounds)]
        end = torch.tensor([IGNORED_LABEL], device="cpu")
        labels = torch.cat([torch.cat((document[1:], end)) for document in documents])
        positions = torch.cat([torch.arange(len(each), device="cpu") for each in documents])
        loss_sum: torch.Tensor = self.model(
            pack.tokens.to(self.device),
            positions.to(self.device),
            dense_attention(bounds),
            labels.to(self.device),
        )
        return loss_sum


def dense_attention(bounds: Sequence[int]) -> Attend:
    """Return causal attention of the documents between `bounds`, each by PyTorch's own call."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        outputs = []
        for start, stop in pairwise(bounds):
            # [T, heads, D] to [1, heads, T, D], which PyTorch has a fused kernel for
            qs, ks, vs = (x[None, start:stop].transpose(1, 2) for x in (q, k, v))
            o = F.scaled_dot_product_attention(qs, ks, vs, is_causal=True, enable_gqa=True)
            outputs.append(o[0].transpose(0, 1))
        return torch.cat(outputs)

    return attend


def _bounds(pack: Pack) -> list[int]:
    bounds: list[int] = pack.cu_seqlens.tolist()
    return bounds
