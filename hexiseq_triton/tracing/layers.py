"""Spans around a decoder's layers, set by hooks: the model itself knows of no timeline.

FSDP2's own hooks come first, so its waiting lies outside the spans. A layer's backward begins where
the gradient of its output is there, and ends where that of its input is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hexiseq_triton.llama import Llama
from hexiseq_triton.timeline import OpenSpan, Timeline
from hexiseq_triton.tracing.phases import LAYER


def record_layers(model: Llama, timeline: Timeline) -> None:
    """Record each layer of `model`, and its logits, whenever `timeline` is enabled.

    Call it after `fully_shard`.
    """
    for block in model.blocks:
        _LayerSpans(timeline).hook(block)
    logits = _LogitsSpan(timeline)
    model.norm.register_forward_hook(logits.start)
    model.register_forward_hook(logits.stop)


class _LayerSpans:
    """The spans of one layer."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._forward: OpenSpan | None = None
        self._backward: OpenSpan | None = None

    def hook(self, layer: nn.Module) -> None:
        layer.register_forward_pre_hook(self._before)
        layer.register_forward_hook(self._after)

    def _before(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._forward = self._timeline.start(LAYER)
        if self._timeline.enabled and inputs[0].requires_grad:
            inputs[0].register_hook(self._stop_backward)

    def _after(self, _: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        self._timeline.stop(self._forward)
        if self._timeline.enabled and output.requires_grad:
            output.register_hook(self._start_backward)

    def _start_backward(self, _: torch.Tensor) -> None:
        self._backward = self._timeline.start(LAYER)

    def _stop_backward(self, _: torch.Tensor) -> None:
        self._timeline.stop(self._backward)


class _LogitsSpan:
    """From the last norm to the model's end."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._open: OpenSpan | None = None

    def start(self, *_: Any) -> None:
        self._open = self._timeline.start("logits")

    def stop(self, *_: Any) -> None:
        self._timeline.stop(self._open)
