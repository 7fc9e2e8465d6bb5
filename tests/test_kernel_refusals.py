"""What the Triton kernels refuse, by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_runs import DEVICE, MARKS, Case, assert_matches_dense, at_once

from hexiseq_triton.kernels import AttentionOptions, HeadMap
from hexiseq_triton.kernels.forward import attention_forward
from hexiseq_triton.kernels.options import MAX_SOFTCAP
from hexiseq_triton.segments import CAUSAL, Segment

pytestmark = MARKS
FP16, FP32 = torch.float16, torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(4, 2, 64, dtype=FP32)}, "k is torch.float16"),
        ({"q": torch.zeros(4, 2, 12, dtype=FP16)}, "head dimension 12"),
        ({"q": torch.zeros(4, 2, 264, dtype=FP16)}, "head dimension 264"),
        ({"q": torch.zeros(4, 2, 64, dtype=torch.int8)}, "q is torch.int8"),
        ({"k": torch.zeros(4, 3, 64, dtype=FP16)}, r"k has shape \(4, 3, 64\)"),
        ({"v": torch.zeros(4, 1, 128, dtype=FP16)[..., ::2]}, "v has last stride 2"),
        ({"o": torch.zeros(4, 2, 64, dtype=FP16)}, "o is torch.float16"),
        ({"o": None}, "o is None"),
        ({"lse": torch.zeros(4, 2)}, "lse has shape"),
    ],
    ids=str,
)
def test_unsupported_inputs_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "q": torch.zeros(4, 2, 64, dtype=FP16),
        "k": torch.zeros(4, 1, 64, dtype=FP16),
        "v": torch.zeros(4, 1, 64, dtype=FP16),
        "o": torch.zeros(4, 2, 64),
        "lse": torch.zeros(2, 4),
    } | change
    segments = (Segment(0, 0, 4),)
    arguments = {k: v if v is None else v.to(DEVICE) for k, v in arguments.items()}
    if "v" in change:
        arguments["v"] = change["v"].to(DEVICE).repeat_interleave(2, -1)[..., ::2]
    with pytest.raises(ValueError, match=message):
        attention_forward(
            *arguments.values(), segments, segments, HeadMap(0, 2), AttentionOptions(CAUSAL, 0.1)
        )


def test_a_negative_scale_is_named() -> None:
    q = torch.zeros(4, 1, 64, dtype=FP16, device=DEVICE)
    lse = torch.zeros(1, 4, device=DEVICE)
    segments = (Segment(0, 0, 4),)
    options = AttentionOptions(CAUSAL, -1.0)
    with pytest.raises(ValueError, match="softmax_scale is -1"):
        attention_forward(q, q, q, q.float(), lse, segments, segments, HeadMap(0, 1), options)


def test_a_softcap_beyond_the_precision_of_tanh_is_named() -> None:
    assert_matches_dense(Case((70,), softcap=MAX_SOFTCAP))
    case = Case((70,), softcap=1e6)
    with pytest.raises(ValueError, match=r"softcap is 1000000\.0; supported: up to 10000"):
        at_once(case, case.inputs())


def test_a_sink_joins_at_the_last_launch_only() -> None:
    case = Case((4,), sink=True)
    q, k, v, _ = case.inputs()
    lse = torch.empty(2, 4, device=DEVICE)
    call = (case.segments, case.segments, *case.call)
    with pytest.raises(ValueError, match="sink is given without `out`"):
        attention_forward(q, k, v, q.float(), lse, *call, sink=case.sinks)
    with pytest.raises(ValueError, match=r"sink has shape \(1,\)"):
        attention_forward(q, k, v, None, lse, *call, first=True, out=q, sink=case.sinks[:1])
