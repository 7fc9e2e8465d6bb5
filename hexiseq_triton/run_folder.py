"""The folder that a run writes into: what lies there, and whether another run may begin in it."""

from __future__ import annotations

import os
from pathlib import Path

from hexiseq_triton.checkpoint import checkpoints_in
from hexiseq_triton.context import ParallelContext
from hexiseq_triton.errors import ConfigError
from hexiseq_triton.training_config import TrainingConfig
from hexiseq_triton.wording import counted

METRICS, CHECKPOINTS, TIMELINE = "metrics.jsonl", "checkpoints", "timeline.json"


def check_folder(context: ParallelContext, config: TrainingConfig) -> None:
    """Refuse a folder that cannot be written, or in which a run would overwrite an older one.

    A collective call: what one rank finds is raised on all of them, before any writes.

    Raises:
        ConfigError: saying what lies there, and what to change.
    """
    problem = _unwritable(context, config)
    if not problem and not config.resume:
        problem = _older_run(Path(config.out))
    _raise_together(context, problem)


def check_writable(context: ParallelContext, config: TrainingConfig) -> None:
    """Refuse a folder that cannot be written, whatever lies there; as `check_folder`."""
    _raise_together(context, _unwritable(context, config))


def _raise_together(context: ParallelContext, problem: str) -> None:
    found = [answer for answer in context.gather("out", problem) if answer]
    if found:
        raise ConfigError("\n".join(dict.fromkeys(found)))


def _unwritable(context: ParallelContext, config: TrainingConfig) -> str:
    """Make the folder if this rank writes; return why it cannot, or "" if it can."""
    out = Path(config.out)
    if context.rank != 0 and config.checkpoint_every is None:
        return ""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"out is {out}, which is no folder and cannot become one: {error.strerror}"
    return "" if os.access(out, os.W_OK) else f"out is {out}; nothing may be written there"


def _older_run(out: Path) -> str:
    """Return what a run left in a folder and would lose; "" if nothing."""
    checkpoints = checkpoints_in(out / CHECKPOINTS)
    metrics = out / METRICS
    if checkpoints:
        held = f"{counted(len(checkpoints), 'checkpoint')} up to {checkpoints[-1]}"
        change = "resume: true goes on with it; else name another out, or remove the folder"
    elif metrics.is_file() and metrics.stat().st_size:
        held = f"{METRICS}, and no checkpoint to go on from"
        change = "name another out, or remove the folder"
    else:
        return ""
    return f"out is {out}, which holds another run ({held}); {change}"
