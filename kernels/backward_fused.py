"""The fused backward: dQ, dK and dV in one kernel, the one of grad_kv.py.

It computes each block of probabilities once, where the split form computes it twice: 10 D FLOPs a
score and not 14. But its dQ passes through memory once for each key tile, as atomic additions in
float32, and its sums run in another order each time. Above head dimension 128 dq, dk and dv of a
tile do not fit the registers together, so there is no fused form.
"""

from __future__ import annotations

import torch

from hexiseq_triton.kernels.backward_inputs import BackwardInputs, Tensors
from hexiseq_triton.kernels.grad_kv import launch_by_key_tiles
from hexiseq_triton.kernels.launch_tables import GRAD_FUSED, config_for, fused_tokens_for

MAX_HEAD_DIM = 128


def prefers_fused(q: torch.Tensor) -> bool:
    """Return whether the fused form was measured to be the faster one for queries like `q`.

    Never on a card or for a head dimension without a measurement, nor in the interpreter.
    """
    if q.device.type != "cuda":
        return False
    return 0 < q.shape[0] <= fused_tokens_for(q)


def grad_fused(
    inputs: BackwardInputs,
    tensors: Tensors,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    """Write dq, dk and dv in any float dtype; with `inputs.accumulate` add to them, in fp32.

    dq of a lower dtype is summed in fp32 scratch memory, and rounded once.
    """
    total = dq
    if not inputs.accumulate:
        total = (
            dq.zero_() if dq.dtype == torch.float32 else torch.zeros_like(dq, dtype=torch.float32)
        )
    config = config_for(GRAD_FUSED, inputs.q)
    launch_by_key_tiles(inputs, config, tensors, total, dk, dv)
    if total is not dq:
        dq.copy_(total)
