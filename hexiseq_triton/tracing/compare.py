"""Run several plans on the same processes, one after the other, and set them side by side."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hexiseq_triton.context import init
from hexiseq_triton.emulation.emulate import Emulation, emulated
from hexiseq_triton.errors import ConfigError
from hexiseq_triton.planner import Cluster, Plan
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.profiling.world import world
from hexiseq_triton.run_folder import check_writable
from hexiseq_triton.tracing.observe import OBSERVED_STEPS, WARM_UP_STEPS, Observer
from hexiseq_triton.tracing.record import Forecast, RecordedRun
from hexiseq_triton.train import Training
from hexiseq_triton.training_config import TrainingConfig
from hexiseq_triton.wording import counted


def compare(
    plans: Sequence[Plan],
    config: TrainingConfig,
    device: torch.device,
    *,
    cluster: Cluster | None = None,
    emulation: Emulation | None = None,
) -> list[RecordedRun] | None:
    """Train a few steps under each plan, from the same start on the same text; collective.

    Args:
        plans: of as many ranks as there are processes.
        config: what to train; its steps, checkpoints and `resume` don't count.
        device: this process's.
        cluster: what the plans were made for: phases are predicted too.
        emulation: slow ranks to emulate.

    Returns:
        What was recorded of each plan, in order; None on ranks other than 0.

    Raises:
        ConfigError: if there are fewer than two plans, some plan is for another number of ranks,
            their steps differ in tokens, or the config's `out` cannot be written.
    """
    if len(plans) < 2:
        given = counted(len(plans), "plan")
        raise ConfigError(f"{given} given; a comparison needs two: repeat --plan")
    steps_tokens = [plan.global_batch * plan.seq_len for plan in plans]
    if len(set(steps_tokens)) > 1:
        raise ConfigError(
            f"the plans' steps are of {', '.join(map(str, steps_tokens))} tokens; compare plans "
            "of one --seq-len and --global-batch"
        )
    steps = WARM_UP_STEPS + OBSERVED_STEPS
    config = replace(config, steps=steps, checkpoint_every=None, resume=False)
    timeout = timedelta(seconds=config.timeout_seconds)
    runs: list[RecordedRun] = []
    with world(device, timeout):
        rank, size = dist.get_rank(), dist.get_world_size()
        for number, plan in enumerate(plans):
            if plan.world_size != size:
                raise ConfigError(
                    f"plan {number + 1} is for {plan.world_size} ranks; {size} processes run. "
                    "Compare plans of one number of ranks, on as many processes"
                )
        with emulated(emulation, rank, size, device) as label:
            for number, plan in enumerate(plans):
                out = Path(config.out) / f"plan-{number + 1}"
                run = _run(plan, replace(config, out=str(out)), device, cluster, emulation, label)
                if run is not None:
                    run.save(out / "timeline.json")
                    runs.append(run)
    return runs if rank == 0 else None


def _run(
    plan: Plan,
    config: TrainingConfig,
    device: torch.device,
    cluster: Cluster | None,
    emulation: Emulation | None,
    label: str,
) -> RecordedRun | None:
    """Return what was recorded of one plan, on rank 0."""
    found: RecordedRun | None = None
    timeout = timedelta(seconds=config.timeout_seconds)
    slow_links = emulation is not None and emulation.delays_links
    with init(plan, device=device, timeout=timeout, symmetric_memory=not slow_links) as context:
        if emulation is not None:
            emulation.delay_links(context)
        check_writable(context, config)
        forecast = Forecast.of(plan, cluster, ModelSpec.load(config.model))
        training = Training(context, config)
        training.observer = Observer(context, forecast, config.steps, emulated=label)
        for _ in range(config.steps):
            training.step()
            seen = training.observer.after(training.steps_done)
            found = found if seen is None else seen[0]
    del training
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found
