"""The output matrix and the loss: how many tokens at a time, and what a token costs.

The logits of a chunk of tokens exist at a time (`hexiseq_triton/cross_entropy.py`). Three products
are matrix work, of which that with the activations adds to the matrix's gradient in float32. What
else reads and writes logits is bound by memory:

    product written, read; log-probabilities written, read in float32; their gradient written
"""

from __future__ import annotations

from hexiseq_triton.planner.problem import Problem, Work
from hexiseq_triton.planner.rates import Floats
from hexiseq_triton.planner.traffic import BF16, FLOAT32

FEWEST_TOKENS = 1024
LOGITS_AT_A_TIME = 1 << 26
"""A chunk has about so many logits, if those are FEWEST_TOKENS rows or more: fewer chunks add to
the matrix's gradient less often."""
PASSES_BYTES = 3 * BF16 + 2 * FLOAT32
"""Read and written of each logit."""


def chunk_tokens(vocab: int) -> int:
    """Return the tokens of a chunk."""
    return max(FEWEST_TOKENS, LOGITS_AT_A_TIME // vocab)


def logits_seconds_per_token(problem: Problem) -> Floats:
    """Return seconds [ranks] of a token in the output matrix and the loss, forward and backward."""
    model, rates = problem.model, problem.rates
    chunk = min(chunk_tokens(model.vocab), problem.workload.step_tokens)
    adding = 2 * FLOAT32 * model.hidden / chunk
    flops = (1 + Work.BACKWARD_LINEAR) * problem.work.logits_per_token
    num_bytes = model.vocab * (PASSES_BYTES + adding)
    result: Floats = flops / rates.gemm_forward + num_bytes / rates.memory
    return result
