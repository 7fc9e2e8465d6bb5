"""A small Llama-style decoder in plain PyTorch: RMSNorm, RoPE, grouped KV heads, SwiGLU.

Tokens are packed rows, [T]; the model knows neither documents nor ranks. Its caller hands it the
attention, `attend(q, k, v) -> o` with q and o [T, H, D], k and v [T, H_kv, D], so the same model
runs under a plan and in one process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from hexiseq_triton.cross_entropy import summed_cross_entropy
from hexiseq_triton.errors import ConfigError
from hexiseq_triton.planner.files import FILE_CONFIG
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.rope import apply_rope, rope_tables

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
INIT_STD = 0.02


@dataclass(frozen=True, config=FILE_CONFIG)
class LlamaConfig(ModelSpec):
    """A decoder's shape, and the two constants that shapes leave open."""

    rope_theta: float = Field(default=10000.0, gt=0)
    norm_eps: float = Field(default=1e-5, gt=0)

    @classmethod
    def from_spec(cls, spec: ModelSpec, *, rope_theta: float = 10000.0) -> LlamaConfig:
        """Take the planner's shape.

        Raises:
            ConfigError: if the shape has a plain MLP; this decoder's is gated.
        """
        if not spec.gated:
            raise ConfigError(
                "the model has gated: false, a plain MLP; the decoder trained here is gated. "
                "Use a preset such as tiny or llama3-8b, or set gated: true"
            )
        return cls(**vars(spec), rope_theta=rope_theta)


class Attention(nn.Module):
    """Projections around the caller's attention."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q = nn.Linear(config.hidden, width, bias=False)
        self.k = nn.Linear(config.hidden, kv_width, bias=False)
        self.v = nn.Linear(config.hidden, kv_width, bias=False)
        self.out = nn.Linear(width, config.hidden, bias=False)

    def forward(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], attend: Attend
    ) -> torch.Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v)
        )
        o = attend(apply_rope(q, *rope), apply_rope(k, *rope), v)
        mixed: torch.Tensor = self.out(o.flatten(1))
        return mixed


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """One decoder layer; with `recompute` it keeps its input alone and runs again in backward."""

    def __init__(self, config: LlamaConfig, *, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.attention_norm = nn.RMSNorm(config.hidden, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden, config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], attend: Attend
    ) -> torch.Tensor:
        if not self.recompute:
            return self._layer(x, rope, attend)
        out: torch.Tensor = checkpoint(self._layer, x, rope, attend, use_reentrant=False)
        return out

    def _layer(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], attend: Attend
    ) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rope, attend)
        out: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Llama(nn.Module):
    """The decoder. A tied model multiplies by its embedding and has no `head`."""

    def __init__(self, config: LlamaConfig, *, recompute: bool = False) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.blocks = nn.ModuleList(
            Block(config, recompute=recompute) for _ in range(config.layers)
        )
        self.norm = nn.RMSNorm(config.hidden, config.norm_eps)
        self.head = None if config.tied else nn.Linear(config.hidden, config.vocab, bias=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attend: Attend,
        labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return logits [T, vocab], or with labels the sum of the token losses in nats, a scalar.

        Args:
            input_ids: packed tokens, [T] int64; T may be 0.
            position_ids: position of each token in its document, [T] int64.
            attend: causal attention of these rows, each document for itself.
            labels: the next token of each, [T] int64, -100 where there is none.
        """
        rope = rope_tables(position_ids, self.config.head_dim, self.config.rope_theta)
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x, rope, attend)
        x = self.norm(x)
        output = self.embedding.weight if self.head is None else self.head.weight
        return F.linear(x, output) if labels is None else summed_cross_entropy(x, output, labels)


@torch.no_grad()
def initialize(model: Llama, seed: int) -> None:
    """Fill the parameters from `seed`; the values don't depend on device or sharding.

    Each parameter is drawn on the CPU from a stream of its own, so that a rank holds one whole
    parameter at a time and keeps its shard. Matrices that end a residual branch begin smaller.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
            continue
        digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "big"))
        ends_branch = name.endswith(("out.weight", "down.weight"))
        std = INIT_STD / (2 * model.config.layers) ** 0.5 if ends_branch else INIT_STD
        whole = torch.empty(parameter.shape, device="cpu").normal_(0.0, std, generator=generator)
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(
                whole.to(parameter.device),
                parameter.device_mesh,
                parameter.placements,
                src_data_rank=None,  # every rank has drawn the same values
            )
        parameter.copy_(whole)
