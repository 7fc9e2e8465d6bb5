"""The demo: an uneven plan for two fast and two slow GPUs trains exactly as one process does.

Four processes train under the plan (on four GPUs if this machine has them, else on its CPU), then
one process trains alone, from the same weights on the same text; see `single` for what it shares.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hexiseq_triton.context import init
from hexiseq_triton.corpus import sequences_of
from hexiseq_triton.demo_report import draw_losses, print_losses, print_plan_chosen, print_verdict
from hexiseq_triton.errors import PeerError
from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.planner import Cluster, Plan, plan
from hexiseq_triton.single import SingleProcessTraining
from hexiseq_triton.tracing.perfetto import write_trace
from hexiseq_triton.train import Training, whole_gradients
from hexiseq_triton.training_config import CorpusOptions, TrainingConfig
from hexiseq_triton.training_parts import make_corpus

CLUSTER: dict[str, Any] = {
    "nodes": [
        {"name": "a", "gpus": ["fast", "slow", "slow"], "intra_gb_per_s": 50},
        {"name": "b", "gpus": ["fast"]},
    ],
    "gpus": {
        "fast": {"dense_tflops": 10, "memory_gb": 12, "network_gb_per_s": 2},
        "slow": {"dense_tflops": 5, "memory_gb": 8, "network_gb_per_s": 2},
    },
}
"""The cluster of examples/clusters/2-fast-2-slow.yaml: the demo also runs where that file isn't."""

MODEL = "tiny"
STEPS = 20
SEQ_LEN = 4096
LR = 1e-3
MAX_RELATIVE_DIFFERENCE = 1e-5
MIN_LOSS_DROP = 1.5  # nats
TIMEOUT_SECONDS = 120.0


class Run(NamedTuple):
    """One run: the loss of each step, and the whole gradient of step 1 by parameter."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Summary:
    """What came out; losses are in nats a token, one a step.

    `documents_cut` counts the documents of step 1 whose tokens lie on more than one rank.
    """

    max_relative_loss_difference: float
    max_relative_gradient_difference: float
    loss_drop: float
    losses_distributed: list[float]
    losses_single: list[float]
    documents_cut: int
    seconds: float
    device: str

    def failures(self, min_loss_drop: float) -> list[str]:
        """Return a sentence for each promise that was not kept."""
        limit, found = MAX_RELATIVE_DIFFERENCE, []
        for name in ("max_relative_loss_difference", "max_relative_gradient_difference"):
            if not getattr(self, name) <= limit:  # NaN fails too
                found.append(f"{name} is {getattr(self, name):.3g}; it must be at most {limit:g}")
        if not self.loss_drop >= min_loss_drop:
            found.append(
                f"loss_drop is {self.loss_drop:.3g} nats; it must be at least {min_loss_drop:g}"
            )
        if not self.documents_cut:
            found.append("no cut runs through a document; the comparison shows little")
        return found


def run_demo(
    out: Path, *, steps: int = STEPS, seq_len: int = SEQ_LEN, min_loss_drop: float = MIN_LOSS_DROP
) -> bool:
    """Run the demo, print what it finds, and write it to `out`; return whether all promises held.

    Raises:
        PeerError: if a process failed; the message is that process's.
    """
    began = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    cluster = Cluster.from_mapping(CLUSTER)
    chosen = plan(cluster, MODEL, seq_len=seq_len, global_batch=1, recompute="none")
    chosen.save(out / "plan.json")
    config = TrainingConfig(
        model=MODEL,
        steps=steps,
        lr=LR,
        out=str(out),
        timeout_seconds=TIMEOUT_SECONDS,
        corpus=CorpusOptions(max_document_tokens=seq_len),
    )
    print_plan_chosen(chosen)
    summary = _trained_and_compared(chosen, config, began)
    (out / "summary.json").write_text(json.dumps(asdict(summary), indent=1) + "\n", "utf-8")
    failures = summary.failures(min_loss_drop)
    draw_losses(summary.losses_distributed, summary.losses_single, out / "loss.png")
    print_losses(summary.losses_distributed, summary.losses_single)
    print_verdict(summary, failures, out)
    return not failures


def _trained_and_compared(chosen: Plan, config: TrainingConfig, began: float) -> Summary:
    """Train both ways and compare; `began` is when the demo did."""
    on_gpus = torch.cuda.device_count() >= chosen.world_size
    found = _train_distributed(chosen, config, "cuda" if on_gpus else "cpu")
    expected = _train_single(chosen, config, "cuda:0" if on_gpus else "cpu")
    assert found.gradients.keys() == expected.gradients.keys()
    return Summary(
        largest(abs(a - b) / b for a, b in zip(found.losses, expected.losses, strict=True)),
        largest(
            float((found.gradients[name] - gradient).norm() / gradient.norm())
            for name, gradient in expected.gradients.items()
        ),
        expected.losses[0] - expected.losses[-1],
        found.losses,
        expected.losses,
        _documents_cut(chosen, config),
        time.perf_counter() - began,
        torch.cuda.get_device_name(0) if on_gpus else "cpu",
    )


def largest(values: Iterable[float]) -> float:
    """Return the largest value; NaN if any is (Python's max would pass it over)."""
    return float(torch.tensor(list(values), dtype=torch.float64).max())


def _train_distributed(chosen: Plan, config: TrainingConfig, device: str) -> Run:
    """Train in one process a rank."""
    results = Path(config.out) / "rank0.pt"
    try:
        mp.spawn(
            _run_rank,
            args=(chosen, config, device, _free_port(), results),
            nprocs=chosen.world_size,
        )
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        raise PeerError(f"a process of the demo failed: {error}") from error
    losses, gradients = torch.load(results)
    results.unlink()
    return Run(losses, gradients)


def _run_rank(
    rank: int, chosen: Plan, config: TrainingConfig, device: str, port: int, results: Path
) -> None:
    """Be one rank: train, and on rank 0 write the results and everyone's timeline."""
    if device == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // chosen.world_size))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(chosen.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    timeout = timedelta(seconds=config.timeout_seconds)
    device = f"cuda:{rank}" if device == "cuda" else device
    with init(chosen, device=device, timeout=timeout) as context:
        context.timeline.enabled = True
        training = _FirstGradientKept(context, config)
        losses = [metrics.loss for metrics in training.run()]
        spans: list[Any] = [None] * chosen.world_size
        dist.all_gather_object(spans, context.timeline.spans(), group=context.world_group)
        if rank == 0:
            write_trace(Path(config.out) / "trace.json", spans)
            torch.save((losses, training.gradients), results)


class _FirstGradientKept(Training):
    """Keeps whole copies of the gradients of step 1."""

    def update(self) -> None:
        if self.steps_done == 0:
            self.gradients = whole_gradients(self)
        super().update()


def _train_single(chosen: Plan, config: TrainingConfig, device: str) -> Run:
    """Train in this process."""
    training = SingleProcessTraining(chosen, config, device)
    losses = [training.backward()]
    gradients = {
        name: parameter.grad.clone().cpu()
        for name, parameter in training.model.named_parameters()
        if parameter.grad is not None
    }
    training.update()
    losses += [training.step() for _ in range(config.steps - 1)]
    return Run(losses, gradients)


def _documents_cut(chosen: Plan, config: TrainingConfig) -> int:
    """Count the documents of step 1 that lie on more than one rank."""
    pack = make_corpus(config).sequences(sequences_of(chosen, 0, 0, 0), chosen.seq_len)
    lengths = [stop - start for start, stop in pairwise(pack.cu_seqlens.tolist())]
    held = BatchLayout(chosen, 0, lengths).segments_of_rank
    ranks_of = [
        {rank for rank, segments in held.items() if any(s.document == i for s in segments)}
        for i in range(len(lengths))
    ]
    return sum(len(ranks) > 1 for ranks in ranks_of)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
