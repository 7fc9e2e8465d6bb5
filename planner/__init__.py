"""Plans for uneven clusters: the nouns, the cost model and the search. Imports no torch."""

from hexiseq_triton.planner.clusters import Cluster, Device
from hexiseq_triton.planner.gpus import GpuSpec, gpu_by_device_name, gpu_table
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.plans import (
    ExchangePlan,
    GroupPlan,
    Plan,
    RankShare,
    ReplicaPlan,
    Split,
)
from hexiseq_triton.planner.solve import STRATEGIES, plan
from hexiseq_triton.planner.workload import Workload

__all__ = [
    "STRATEGIES",
    "Cluster",
    "Device",
    "ExchangePlan",
    "GpuSpec",
    "GroupPlan",
    "ModelSpec",
    "Plan",
    "RankShare",
    "ReplicaPlan",
    "Split",
    "Workload",
    "gpu_by_device_name",
    "gpu_table",
    "plan",
]
