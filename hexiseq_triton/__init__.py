"""Train LLMs on very long sequences over mixed GPUs.

Plan who owns which tokens and heads (no GPU, no torch needed), then carry the plan out:

    plan = hx.plan("cluster.yaml", "llama3-8b", seq_len=131072)
    with hx.init(plan) as context:                      # under torchrun
        attention = hx.HexiSeqAttention(context, causal=True)

Names load on first use, so that planning never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hexiseq_triton.attention import hexiseq_attention
    from hexiseq_triton.context import ParallelContext, init
    from hexiseq_triton.cross_entropy import summed_cross_entropy, summed_cross_entropy_of_logits
    from hexiseq_triton.errors import (
        ConfigError,
        HexiSeqError,
        InfeasibleError,
        InputError,
        PeerError,
        PlanError,
    )
    from hexiseq_triton.flash import flash_attn_func, flash_attn_varlen_func
    from hexiseq_triton.layout import BatchLayout
    from hexiseq_triton.module import HexiSeqAttention
    from hexiseq_triton.planner import (
        Cluster,
        ModelSpec,
        Plan,
        Split,
        Workload,
        max_seq_len,
        plan,
        resplit,
    )
    from hexiseq_triton.rope import Rope
    from hexiseq_triton.shard import LocalBatch

_HOME = {
    "BatchLayout": "layout",
    "Cluster": "planner",
    "ConfigError": "errors",
    "HexiSeqAttention": "module",
    "HexiSeqError": "errors",
    "InfeasibleError": "errors",
    "InputError": "errors",
    "LocalBatch": "shard",
    "ModelSpec": "planner",
    "ParallelContext": "context",
    "PeerError": "errors",
    "Plan": "planner",
    "PlanError": "errors",
    "Rope": "rope",
    "Split": "planner",
    "Workload": "planner",
    "flash_attn_func": "flash",
    "flash_attn_varlen_func": "flash",
    "hexiseq_attention": "attention",
    "init": "context",
    "max_seq_len": "planner",
    "plan": "planner",
    "resplit": "planner",
    "summed_cross_entropy": "cross_entropy",
    "summed_cross_entropy_of_logits": "cross_entropy",
}

__all__ = [
    "BatchLayout",
    "Cluster",
    "ConfigError",
    "HexiSeqAttention",
    "HexiSeqError",
    "InfeasibleError",
    "InputError",
    "LocalBatch",
    "ModelSpec",
    "ParallelContext",
    "PeerError",
    "Plan",
    "PlanError",
    "Rope",
    "Split",
    "Workload",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "hexiseq_attention",
    "init",
    "max_seq_len",
    "plan",
    "resplit",
    "summed_cross_entropy",
    "summed_cross_entropy_of_logits",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hexiseq_triton' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hexiseq_triton.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
