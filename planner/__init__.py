"""Plans for uneven clusters: the nouns, the cost model and the search. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hexiseq_triton.planner.clusters import Cluster, Device
from hexiseq_triton.planner.gpus import GpuSpec, gpu_by_device_name, gpu_table
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.plans import (
    ExchangePlan,
    GroupPlan,
    IdleRank,
    Plan,
    RankShare,
    ReplicaPlan,
    Split,
)
from hexiseq_triton.planner.solve import STRATEGIES, max_seq_len, plan
from hexiseq_triton.planner.workload import Workload

if TYPE_CHECKING:
    from hexiseq_triton.planner.resplitting import resplit

__all__ = [
    "STRATEGIES",
    "Cluster",
    "Device",
    "ExchangePlan",
    "GpuSpec",
    "GroupPlan",
    "IdleRank",
    "ModelSpec",
    "Plan",
    "RankShare",
    "ReplicaPlan",
    "Split",
    "Workload",
    "gpu_by_device_name",
    "gpu_table",
    "max_seq_len",
    "plan",
    "resplit",
]


def __getattr__(name: str) -> Any:
    if name == "resplit":
        from hexiseq_triton.planner.resplitting import resplit  # numba is slow to import

        return resplit
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
