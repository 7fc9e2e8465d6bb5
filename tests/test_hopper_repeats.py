"""The Hopper forward on random layouts: as the portable kernels, and again and again the same bits.

A wrong order of shared memory's readers and writers shows now and then only, and most with few
programs and short tiles: many turns of the same buffers, each with hardly any work in between. So
the layouts have windows, tiny documents and rows that see nothing, and leave most of the card free.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kernel_runs import DEVICE, ON_CARD

from hexiseq_triton.kernels import AttentionOptions, HeadMap
from hexiseq_triton.kernels.configs import num_sms
from hexiseq_triton.kernels.forms import form, forms
from hexiseq_triton.kernels.forward import attention_forward
from hexiseq_triton.kernels.forward_call import ForwardCall
from hexiseq_triton.kernels.hopper import guard
from hexiseq_triton.kernels.interned import interned
from hexiseq_triton.kernels.options import PlacedSegment
from hexiseq_triton.segments import Mask, whole_documents

ON_HOPPER = ON_CARD and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_HOPPER, reason="needs a card of compute capability 9.0"),
]
BF16, FP16 = torch.bfloat16, torch.float16
BENCH = Path(__file__).resolve().parent.parent / "bench"
LAYOUTS = 125
HELD_LAYOUTS = 40
HOLDS = 4
REPEATS = 8
FREE = (0, 8, 100, 128, 131)
"""Multiprocessors left to others, of an H100's 132."""
WINDOWS = (Mask(0, 0), Mask(100, 0), Mask(130, 0), Mask(1000, 0), Mask(17, 90))
CLOSE = {BF16: {"atol": 2e-2, "rtol": 2**-7}, FP16: {"atol": 3e-3, "rtol": 2**-10}}
"""Two units in the last place of outputs up to 4."""


@dataclass(frozen=True)
class Family:
    """What is compiled in: the layouts of a family share a kernel for each of their launches."""

    head_dim: int
    dtype: torch.dtype
    masks: tuple[Mask, ...]
    num_launches: int = 1
    sink: bool = False
    softcap: float = 0.0


FAMILIES = {
    "128 windows": Family(128, BF16, WINDOWS),
    "128 causal, carried": Family(128, BF16, (Mask(None, 0),), 3),
    "128 windows, carried, sink": Family(128, FP16, WINDOWS, 2, sink=True),
    "128 full, carried": Family(128, BF16, (Mask(None, None),), 2),
    "64 windows": Family(64, BF16, WINDOWS),
    "64 causal, sink, softcap": Family(64, FP16, (Mask(None, 0),), sink=True, softcap=3.0),
    "64 windows, carried": Family(64, BF16, WINDOWS, 3),
    "256 windows, carried": Family(256, BF16, WINDOWS, 2),
}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_random_layouts_repeat_bitwise_and_match_the_portable_kernels(family: Family) -> None:
    for seed in range(LAYOUTS):
        layout = Layout(family, seed)
        out, lse = layout.run()
        expected, expected_lse = layout.run_portable()
        torch.testing.assert_close(out.float(), expected.float(), **CLOSE[family.dtype])
        torch.testing.assert_close(lse, expected_lse, atol=2e-4, rtol=1e-5)
        for _ in range(REPEATS):
            again = layout.run()
            assert torch.equal(again[0], out), layout
            assert torch.equal(again[1], lse), layout


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_programs_that_begin_late_leave_their_tiles_to_others(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another kernel holds some or most of the card, so that programs begin when others have ended,
    and find all, some or none of their tiles taken."""
    monkeypatch.syspath_prepend(str(BENCH))
    from held import held

    layouts = [Layout(family, seed) for seed in range(HELD_LAYOUTS)]
    for _ in range(3):  # as much memory as below, which cannot be had while the card is busy
        alone, beside = ([layout.run() for layout in layouts] for _ in range(2))
    sms = num_sms(torch.device(DEVICE))
    counts = (1, 40, 90, sms - 12, sms - 1) * HOLDS
    num_held = 0
    for count in counts:
        try:
            with held(count, longest_s=0.5):
                beside = [layout.run() for layout in layouts]
                torch.cuda.current_stream().synchronize()
            num_held += 1
        except TimeoutError:  # other processes use the card
            torch.cuda.synchronize()
        for layout, expected, found in zip(layouts, alone, beside, strict=True):
            assert torch.equal(found[0], expected[0]), layout
            assert torch.equal(found[1], expected[1]), layout
    assert num_held >= HOLDS


class Layout:
    """One attention drawn at random: documents, heads, scale, chunks of keys, free processors."""

    def __init__(self, family: Family, seed: int) -> None:
        draw = random.Random(seed)
        self._family, self._seed = family, seed
        self._unit = draw.choice([1, 128])  # whole blocks: tiles with several spans and no edge
        longest = draw.choice([3, 130, 300, 2000])
        self._lengths = [
            self._unit * -(-draw.randint(1, longest) // self._unit)
            for _ in range(draw.randint(1, 6))
        ]
        q_per_kv, kv_heads = draw.choice([1, 2, 3]), draw.choice([1, 2])
        scale = draw.choice([0.3, 1.0, 3.0]) * family.head_dim**-0.5
        options = AttentionOptions(draw.choice(family.masks), scale, family.softcap)
        self._call = (HeadMap(0, q_per_kv), options)
        self._sm_margin = draw.choice(FREE)
        heads = q_per_kv * kv_heads
        generator = torch.Generator(DEVICE).manual_seed(seed)
        self._q, self._k, self._v = (self._rows(h, generator) for h in (heads, kv_heads, kv_heads))
        self._sink = torch.linspace(-3.0, 5.0, heads, device=DEVICE) if family.sink else None
        tokens = sum(self._lengths)
        blocks = tokens // self._unit
        cuts = sorted(self._unit * draw.randint(0, blocks) for _ in range(family.num_launches - 1))
        self._chunks = [self._keys(*edges) for edges in pairwise([0, *cuts, tokens])]

    def __repr__(self) -> str:
        return f"layout {self._seed}: {self._lengths} {self._call} {self._sm_margin}"

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out and lse by the Hopper kernel, written over NaN."""
        from hexiseq_triton.kernels.hopper import forward

        o, lse, out = self._outputs()
        for i, keys in enumerate(self._chunks):
            first, last = i == 0, i == len(self._chunks) - 1
            tensors = (self._q, self._k, self._v, o, lse, out if last else o)
            sink = self._sink if last else None
            call = ForwardCall(
                *forms(tensors), None if sink is None else form(sink),
                interned(self._segments), interned(keys), *self._call,
                first=first, last=last, sm_margin=self._sm_margin,
            )  # fmt: skip
            run = forward.prepare(call)
            if run is not None:  # else no query sees a key of this chunk
                run(*tensors, sink)
        return out, lse

    def run_portable(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same by the portable kernel, in one launch."""
        _, lse, out = self._outputs()
        segments = self._segments
        with patch.object(guard, "runs", lambda *_: False):
            attention_forward(
                self._q, self._k, self._v, None, lse, segments, segments, *self._call,
                first=True, out=out, sink=self._sink,
            )  # fmt: skip
        return out, lse

    @property
    def _segments(self) -> tuple[Any, ...]:
        return tuple(whole_documents(self._lengths))

    def _rows(self, heads: int, generator: torch.Generator) -> torch.Tensor:
        """Draw rows between rows of NaN."""
        tokens, head_dim = sum(self._lengths), self._family.head_dim
        shape = (tokens + 128, heads, head_dim)
        buffer = torch.full(shape, torch.nan, dtype=self._family.dtype, device=DEVICE)
        view = buffer[64 : 64 + tokens]
        return view.copy_(torch.randn(view.shape, device=DEVICE, generator=generator))

    def _outputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        o = torch.full(self._q.shape, torch.nan, device=DEVICE)
        lse = torch.full((self._q.shape[1], self._q.shape[0]), torch.nan, device=DEVICE)
        return o, lse, torch.full_like(self._q, torch.nan)

    def _keys(self, begin: int, end: int) -> tuple[PlacedSegment, ...]:
        """Return rows [begin, end) as placed segments, two for each document."""
        starts = [0, *accumulate(self._lengths)]
        found = []
        for document, (a, b) in enumerate(pairwise(starts)):
            first, last = max(a, begin), min(b, end)
            middle = first + (last - first) // 2 // self._unit * self._unit
            for start, stop in ((first, middle), (middle, last)):
                if start < stop:
                    found.append(PlacedSegment(document, start - a, stop - a, start))
        return tuple(found)
