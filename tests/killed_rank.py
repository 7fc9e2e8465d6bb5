"""One process of two; rank 1 kills itself after a good call. Run by test_multigpu.

python killed_rank.py (heads | ring) (peer memory | nccl) TIMEOUT_SECONDS
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch

from hexiseq_triton.attention import hexiseq_attention
from hexiseq_triton.context import init
from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.planner import Plan, Split

TOKENS = 256


def main(layout: str, path: str, seconds: float) -> None:
    splits = {
        "heads": [Split((TOKENS, TOKENS), (4, 4))],
        "ring": [Split((TOKENS,), (8,)), Split((TOKENS,), (8,))],
    }[layout]
    timeout = timedelta(seconds=seconds)
    context = init(
        Plan.from_splits(splits), timeout=timeout, symmetric_memory=path == "peer memory"
    )
    batch = BatchLayout(context.plan, context.rank, (2 * TOKENS,))
    q, k, v = (
        torch.randn(TOKENS, 8, 128, device=context.device, dtype=torch.bfloat16) for _ in range(3)
    )
    hexiseq_attention(q, k, v, context, batch, causal=True)
    torch.cuda.synchronize()
    time.sleep(1.0)  # the other is done too
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    print("attending without the others", flush=True)
    hexiseq_attention(q, k, v, context, batch, causal=True)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
