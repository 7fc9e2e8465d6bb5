"""What a rank's step consists of: phases measured from its spans, beside those predicted.

Each instant of a step belongs to one phase, that of the innermost span around it:

    token-wise   computing inside layers, all but attention
    attention    attention kernels
    all-to-all   the compute stream waits for an all-to-all, or for slower ranks of the group
    exchange     the compute stream waits for keys, or for gradients that come back
    FSDP         forward and backward outside layers: FSDP's transfers that nothing hides, slower
                 groups, and the little work beside the layers
    logits       the output matrix and the loss, forward
    optimizer    clipping and the optimizer
    idle         the rest of the step: waiting for the slowest rank at its end, and the host

`COMPUTING` is a rank's own work, `COMMUNICATION` what holds it up. An idle rank computes nothing:
all its phases count as idle.
"""

from __future__ import annotations

from collections.abc import Sequence

from hexiseq_triton.planner.cost import Cost
from hexiseq_triton.planner.terms import Terms, terms_of
from hexiseq_triton.timeline import COMPUTE, Span

Phases = dict[str, float]
"""Seconds of one step by phase."""

COMPUTING = ("token-wise", "attention", "logits", "optimizer")
COMMUNICATION = ("all-to-all", "exchange", "FSDP")
PHASES = (
    "token-wise",
    "attention",
    "all-to-all",
    "exchange",
    "FSDP",
    "logits",
    "optimizer",
    "idle",
)
STEP = "step"
LAYER = "layer"
_BY_NAME = {
    STEP: "idle",
    "forward": "FSDP",
    "backward": "FSDP",
    LAYER: "token-wise",
    "logits": "logits",
    "optimizer": "optimizer",
}
_BY_BEGINNING = {"attention": "attention", "all-to-all": "all-to-all", "wait": "exchange"}


def phase_of(name: str) -> str | None:
    """Return the phase of a span; None for one that belongs to whatever is around it."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    return next((p for start, p in _BY_BEGINNING.items() if name.startswith(start)), None)


def measured_phases(spans: Sequence[Span], *, works: bool = True) -> Phases:
    """Return the phases of a rank's steps, on average.

    Args:
        spans: of one rank, with one span "step" around each step.
        works: whether the rank holds tokens or heads.

    Raises:
        ValueError: if there is no step.
    """
    known = [s for s in spans if s.stream == COMPUTE and phase_of(s.name) is not None]
    steps = [span for span in known if span.name == STEP]
    if not steps:
        raise ValueError(f"{len(spans)} spans hold no span {STEP!r}")
    totals = dict.fromkeys(PHASES, 0.0)
    inside = [s for s in known if any(_contains(step, s) for step in steps)]
    around: list[Span] = []
    for span in sorted(inside, key=lambda s: (s.start_seconds, -s.seconds)):
        while around and not _contains(around[-1], span):
            around.pop()
        if around:  # its time is no longer the outer span's
            totals[_phase(around[-1])] -= span.seconds
        totals[_phase(span)] += span.seconds
        around.append(span)
    mean = {name: max(seconds, 0.0) / len(steps) for name, seconds in totals.items()}
    if works:
        return mean
    return dict.fromkeys(PHASES, 0.0) | {"idle": sum(mean.values())}


def _phase(span: Span) -> str:
    phase = phase_of(span.name)
    assert phase is not None
    return phase


def _contains(outer: Span, inner: Span) -> bool:
    """Return whether the middle of `inner` lies in `outer`; events are only exact to half a us."""
    middle = inner.start_seconds + inner.seconds / 2
    return outer.start_seconds <= middle <= outer.stop_seconds and outer.seconds >= inner.seconds


def predicted_phases(cost: Cost) -> list[Phases]:
    """Return what the planner predicts of each rank's step, in the same phases."""
    terms = terms_of(cost)
    working = set(cost.rows.rank.tolist())
    return [_predicted(terms, rank, rank in working) for rank in range(len(terms["logits"]))]


_TERMS = {
    "token-wise": "token-wise",
    "attention": "attention",
    "all-to-all": "all-to-all",
    "wait for the group": "all-to-all",
    "exchange": "exchange",
    "wait for the slowest group": "FSDP",
    "FSDP": "FSDP",
    "FSDP outside layers": "FSDP",
    "logits": "logits",
    "wait for logits": "FSDP",
    "optimizer": "optimizer",
    "wait for optimizer": "idle",
}
"""The phase in which each term of the planner's shows; forward and backward are put together."""


def _predicted(terms: Terms, rank: int, works: bool) -> Phases:
    phases = dict.fromkeys(PHASES, 0.0)
    for name, seconds in terms.items():
        term = name.removeprefix("forward ").removeprefix("backward ")
        phases[_TERMS[term] if works else "idle"] += float(seconds[rank])
    return phases


def visible_share(document_lengths: Sequence[int], seq_len: int) -> float:
    """Return the (query, key) pairs of packed documents, as a share of those of whole sequences.

    The documents fill some sequences of `seq_len` tokens each.
    """
    tokens = sum(document_lengths)
    pairs = sum(n * (n + 1) / 2 for n in document_lengths)
    return pairs / (tokens * (seq_len + 1) / 2) if tokens else 1.0
