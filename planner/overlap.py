"""How computing and transfers that go on at once slow each other."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from hexiseq_triton.planner.files import FILE_CONFIG

Share = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, config=FILE_CONFIG)
class Overlap:
    """Slowdowns, as shares of the time; assumed until `hexiseq profile` measures them.

    For each second that both last, computing takes `compute_slowdown` s longer, since transfers'
    kernels occupy some multiprocessors, and the transfer `transfer_slowdown` s. Attention that
    exchanges keys runs in several launches, adds partial gradients up and leaves multiprocessors
    to transfers: it takes `attention_slowdown` longer as a whole, waiting left out.
    """

    compute_slowdown: Share = 0.05
    transfer_slowdown: Share = 0.1
    attention_slowdown: Share = 0.0


ASSUMED = Overlap()
