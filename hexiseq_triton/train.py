"""Train under a plan: FSDP2 over all ranks, attention by the plan, one mean over all tokens.

A step runs the plan's `accumulation` passes. Each pass gives every replica its sequences of the
corpus, and every rank its rows of them, however few: a rank without tokens runs forward and
backward too, since FSDP2's collectives need it.

A few steps after the first are observed: what each rank did, beside what the plan predicts, is
printed and written to `timeline.json` (docs/recorded-runs.md).
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hexiseq_triton import checkpoint
from hexiseq_triton.context import ParallelContext, init
from hexiseq_triton.corpus import sequences_of
from hexiseq_triton.devices import local_device
from hexiseq_triton.emulation.emulate import Emulation, emulated
from hexiseq_triton.environment import settle_environment
from hexiseq_triton.metrics import Report, StepMetrics
from hexiseq_triton.module import HexiSeqAttention
from hexiseq_triton.planner import Cluster, Plan
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.profiling.world import profile_command
from hexiseq_triton.reports.terminal import terminal
from hexiseq_triton.run_folder import CHECKPOINTS, METRICS, TIMELINE, check_folder
from hexiseq_triton.shard import IGNORED_LABEL, LocalBatch
from hexiseq_triton.tracing.layers import record_layers
from hexiseq_triton.tracing.observe import Observer, save_trace
from hexiseq_triton.tracing.phases import STEP
from hexiseq_triton.tracing.record import Forecast
from hexiseq_triton.tracing.report import print_recorded
from hexiseq_triton.training_config import TrainingConfig
from hexiseq_triton.training_parts import (
    agree_on_run,
    apply_gradient,
    make_corpus,
    make_optimizer,
    model_config,
    remarks,
    sharded_model,
)

_log = logging.getLogger(__name__)


def train(
    plan: Plan | str | Path,
    config: TrainingConfig | str | Path,
    device: torch.device | str | None = None,
    *,
    cluster: Cluster | str | Path | None = None,
    trace: str | Path | None = None,
    emulation: Emulation | None = None,
) -> list[StepMetrics]:
    """Train as `config` says under `plan`; a collective call of all ranks, under torchrun.

    Writes `metrics.jsonl`, `timeline.json` and checkpoints into the config's `out`, which must hold
    no other run unless the config says `resume`.

    Args:
        plan: a plan or its file.
        config: a configuration or its file.
        device: this process's device, as in `hexiseq_triton.init`.
        cluster: what the plan was made for, or its file: the phases of a step are then predicted
            too, and not only the step and each rank's computing.
        trace: write the observed steps of all ranks here, as a Chrome trace.
        emulation: slow ranks to emulate; everything written is labelled.

    Returns:
        The metrics of each step done here, the same losses on every rank.

    Raises:
        ConfigError: if a field is wrong, or the model doesn't fit the plan; the same on every rank
            if ranks have different configurations, models or documents, if `out` holds another
            run, or if there is nothing to resume from.
        PlanError: as `hexiseq_triton.init` does.
        PeerError: if another rank failed; the message is that rank's.
    """
    if not isinstance(config, TrainingConfig):
        config = TrainingConfig.load(config)
    cluster_file = "cluster.yaml" if isinstance(cluster, Cluster | None) else cluster
    if cluster is not None and not isinstance(cluster, Cluster):
        cluster = Cluster.load(cluster)
    settle_environment()  # an emulation uses the GPU before `init`
    chosen = local_device(device)
    timeout = timedelta(seconds=config.timeout_seconds)
    slow_links = emulation is not None and emulation.delays_links
    with (
        emulated(emulation, *_rank_and_world(), chosen) as label,
        init(plan, device=chosen, timeout=timeout, symmetric_memory=not slow_links) as context,
    ):
        if emulation is not None:
            emulation.delay_links(context)
        check_folder(context, config)
        training = Training(context, config)
        spec = ModelSpec.load(config.model)
        left = config.steps - training.steps_done
        forecast = Forecast.of(context.plan, cluster, spec)
        observer = Observer(context, forecast, left, training.steps_done, label)
        measure = profile_command(context.plan.world_size, config.model, cluster_file, emulation)
        return training.run(observer, trace, measure)


def _rank_and_world() -> tuple[int, int]:
    """Return this process's number and how many there are, before or after they have met."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Training:
    """One rank's part of a run; made, and stepped, by all ranks together.

    Attributes:
        model: the decoder, sharded by FSDP2.
        steps_done: optimizer steps so far.
        observer: what watches the steps, if anything does.
    """

    def __init__(self, context: ParallelContext, config: TrainingConfig) -> None:
        self.context = context
        self.config = config
        with context.guard():  # a file may be missing on one node only
            shape = model_config(config, context.plan)
            self.corpus = make_corpus(config)
            agree_on_run(context, config, shape, self.corpus)
            for remark in remarks(context.plan, config, self.corpus) if context.rank == 0 else ():
                _log.warning(remark)
        self.model = sharded_model(shape, context, config)
        record_layers(self.model, context.timeline)
        self.optimizer = make_optimizer(self.model, config)
        self.steps_done = 0
        self.observer: Observer | None = None
        self._origin = 0
        self._attention = HexiSeqAttention(context, causal=True)
        if config.resume:
            self._resume()

    @property
    def _checkpoints(self) -> Path:
        return Path(self.config.out) / CHECKPOINTS

    @property
    def _step_tokens(self) -> int:
        return self.context.plan.global_batch * self.context.plan.seq_len

    def _resume(self) -> None:
        """Go on from the newest checkpoint, at the token that its run came to."""
        decays = [group["weight_decay"] for group in self.optimizer.param_groups]
        found = checkpoint.resume(
            self._checkpoints,
            self.corpus.text,
            self.model,
            self.optimizer,
            self.context.world_group,
        )
        for group, decay in zip(self.optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay  # as the configuration says now
        self.steps_done = found.step
        # the plan may be one of other steps than those before
        self._origin = found.tokens - found.step * self._step_tokens
        if self.context.rank == 0 and found.step >= self.config.steps:
            _log.warning(
                "nothing to do: %s holds step %d, and steps, counted from the beginning, is %d",
                self._checkpoints,
                found.step,
                self.config.steps,
            )

    def run(
        self, observer: Observer | None = None, trace: str | Path | None = None, measure: str = ""
    ) -> list[StepMetrics]:
        """Take the steps that are left; return their metrics.

        Args:
            observer: watches some of them; what it saw is printed and written.
            trace: write what it saw here too, as a Chrome trace.
            measure: the command that measures the cluster, told where the prediction was far off.
        """
        self.observer = observer
        done: list[StepMetrics] = []
        if self.steps_done >= self.config.steps:
            return done
        with self._report() or nullcontext() as report:
            while self.steps_done < self.config.steps:
                done.append(self.step())
                if report is not None:
                    report.write(done[-1])
                self._look_back(trace, measure)
                every = self.config.checkpoint_every
                last = self.steps_done == self.config.steps
                if every and (last or self.steps_done % every == 0):
                    self.save()
        return done

    def _report(self) -> Report | None:
        if self.context.rank != 0:
            return None
        path = Path(self.config.out) / METRICS
        label = "" if self.observer is None else self.observer.emulated
        return Report(path, start=self.steps_done, steps=self.config.steps, emulated=label)

    def _look_back(self, trace: str | Path | None, measure: str) -> None:
        """After the last observed step, print and write what was seen."""
        found = None if self.observer is None else self.observer.after(self.steps_done)
        if found is None:
            return
        run, spans = found
        run.save(Path(self.config.out) / TIMELINE)
        if trace is not None:
            save_trace(trace, run, spans)
        print_recorded(run, terminal(), measure)

    def step(self) -> StepMetrics:
        """Take one optimizer step."""
        if self.observer is not None:
            self.observer.before(self.steps_done + 1)
        began = time.perf_counter()
        with self.context.timeline.span(STEP):
            mean = self.backward()
            self.update()
            loss = float(mean)  # on CUDA waits for the device
        seconds = time.perf_counter() - began
        tokens = self._step_tokens
        return StepMetrics(self.steps_done, loss, tokens, seconds, tokens / seconds)

    def backward(self) -> torch.Tensor:
        """Leave the step's gradient in the parameters; return its mean loss, alike on all ranks."""
        context = self.context
        batches = [self._batch(turn) for turn in range(context.plan.accumulation)]
        # of the whole step: each pass is weighted by all tokens, and the passes add up
        num_tokens = sum(int((batch["labels"] != IGNORED_LABEL).sum()) for batch in batches)
        total = torch.zeros((), device=context.device)
        for batch in batches:
            attend = partial(self._attention, layout=batch.layout)
            with context.timeline.span("forward"):
                loss_sum = self.model(
                    batch["input_ids"], batch.position_ids, attend, batch["labels"]
                )
            with context.timeline.span("loss"):
                mean = context.token_mean(
                    loss_sum, num_tokens, grad_average=context.plan.world_size
                )
            with context.timeline.span("backward"):
                mean.backward()
            total += mean.detach()
        return total

    def _batch(self, turn: int) -> LocalBatch:
        """Return this rank's rows of the next step's pass `turn`."""
        plan, replica = self.context.plan, self.context.replica
        indices = sequences_of(plan, replica, self.steps_done, turn)
        tokens, cu_seqlens = self.corpus.sequences(indices, plan.seq_len, self._origin)
        with self.context.timeline.span("shard"):
            batch = self.context.shard(
                {"input_ids": tokens, "labels": tokens}, cu_seqlens=cu_seqlens
            )
        if self.observer is not None:
            self.observer.batch(batch.layout)
        return batch

    def update(self) -> None:
        """Apply the gradient and forget it."""
        with self.context.timeline.span("optimizer"):
            apply_gradient(self.model, self.optimizer, self.config, self.steps_done)
        self.steps_done += 1

    def save(self) -> None:
        """Write a checkpoint."""
        tokens = self._origin + self.steps_done * self._step_tokens
        checkpoint.save(
            self._checkpoints,
            checkpoint.Position(self.steps_done, tokens, self.corpus.text),
            self.model,
            self.optimizer,
            self.context.world_group,
        )


def whole_gradients(training: Training) -> dict[str, torch.Tensor]:
    """Return every parameter's whole gradient on the CPU; a collective call of all ranks."""
    return {
        name: parameter.grad.full_tensor().cpu()
        for name, parameter in training.model.named_parameters()
        if isinstance(parameter.grad, DTensor)
    }
