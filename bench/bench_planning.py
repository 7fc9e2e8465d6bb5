"""How long planning takes, and the host's share of a batch: read seconds, lower is better.

`hx.plan` runs from parsed files to a validated plan, with all baselines, the bound and memory; the
first, cold call (imports of the solver) is not counted. The layout bench deals a packed batch of
long-tailed documents and orders its transfers, the tile map bench turns 1,000 documents into the
kernels' blocks: what a rank does on the CPU once a batch.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from hexiseq_triton.kernels.tilemap import build_map
from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.planner import Cluster, ModelSpec, Plan, Split, plan
from hexiseq_triton.segments import CAUSAL, whole_documents

CLUSTERS = Path(__file__).resolve().parent.parent / "examples" / "clusters"


@pytest.mark.benchmark(group="plan")
@pytest.mark.parametrize(
    ("cluster", "model", "seq_len"),
    [
        ("2-fast-2-slow", "tiny", 4096),
        ("8xh100-8xa100", "7b", 131072),
        ("8xh100-8xa100", "13b", 131072),
        ("128-gpus-4-models", "7b", 524288),
        ("128-gpus-4-models", "70b", 524288),
    ],
)
def bench_plan(benchmark: Any, cluster: str, model: str, seq_len: int) -> None:
    parsed, spec = Cluster.load(CLUSTERS / f"{cluster}.yaml"), ModelSpec.load(model)
    benchmark.pedantic(
        plan, args=(parsed, spec), kwargs={"seq_len": seq_len}, rounds=3, warmup_rounds=1
    )


@pytest.mark.benchmark(group="layout")
@pytest.mark.parametrize("num_groups", [2, 8])
def bench_layout(benchmark: Any, num_groups: int) -> None:
    groups = [Split((16384, 16384), (16, 16))] * num_groups
    split = Plan.from_splits(groups, num_kv_heads=8)
    drawn = random.Random(0)
    lengths: list[int] = []
    while sum(lengths) < split.seq_len:
        lengths.append(min(int(drawn.paretovariate(1.1) * 60), split.seq_len - sum(lengths)))

    def lay_out() -> int:
        return len(BatchLayout(split, 0, lengths).rounds(CAUSAL))

    benchmark.extra_info["documents"] = len(lengths)
    benchmark.pedantic(lay_out, rounds=5, warmup_rounds=1)


@pytest.mark.benchmark(group="tile map")
@pytest.mark.parametrize("block", [64, 128])
def bench_tile_map(benchmark: Any, block: int) -> None:
    cuts = sorted(random.Random(0).sample(range(1, 131072), 999))
    lengths = [b - a for a, b in zip([0, *cuts], [*cuts, 131072], strict=True)]
    segments = whole_documents(lengths)
    benchmark.pedantic(
        build_map, args=(segments, segments, CAUSAL, block, block), rounds=15, warmup_rounds=1
    )
