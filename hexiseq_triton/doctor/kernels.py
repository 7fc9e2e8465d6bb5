"""Which attention kernels a rank runs and why, and whether they are right, by a small call."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from hexiseq_triton.kernels import reference
from hexiseq_triton.kernels.options import AttentionOptions, HeadMap
from hexiseq_triton.segments import CAUSAL, whole_documents

HEAD_DIM, TOKENS, HEADS = 128, 512, 2
MOST_ERROR = 2e-2
"""Largest relative error in bf16 of the small call: far above rounding, far below wrong."""


@dataclass(frozen=True)
class KernelPath:
    """The path, why it is taken, what is wrong with it, and what is worth knowing."""

    name: str
    why: str
    problem: str = ""
    remark: str = ""


def kernel_path(device: torch.device) -> KernelPath:
    """Return what attention in bf16 with head dimension 128 runs on `device`."""
    if device.type != "cuda":
        return KernelPath("reference", "no CUDA device")
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return KernelPath(
            "none",
            f"compute capability {capability[0]}.{capability[1]}",
            problem="the kernels need bf16 tensor cores, from compute capability 8.0 on: leave "
            "this GPU out",
        )
    try:
        error = _small_call_error(device)
    except Exception as fault:  # a compiler or driver may raise anything
        message = (str(fault).strip().splitlines() or [type(fault).__name__])[0]
        return KernelPath("none", "a small call failed", problem=f"attention fails: {message}")
    path = _path_taken(device, capability)
    if not error <= MOST_ERROR:
        wrong = f"attention is wrong by {error:.2g} (at most {MOST_ERROR:g}): do not train on it"
        return KernelPath(path.name, path.why, problem=wrong)
    return path


def _path_taken(device: torch.device, capability: tuple[int, int]) -> KernelPath:
    """Return the path that the small call took."""
    from hexiseq_triton.kernels.hopper import guard

    probe = torch.empty(1, 1, HEAD_DIM, device=device, dtype=torch.bfloat16)
    taken = [guard.runs(direction, probe) for direction in ("forward", "backward")]
    architecture = f"sm_{capability[0]}{capability[1]}"
    if all(taken):
        return KernelPath("hopper", architecture)
    if capability != (9, 0):
        return KernelPath("portable", architecture)
    if os.environ.get("HEXISEQ_HOPPER") == "0":
        return KernelPath("portable", "HEXISEQ_HOPPER=0", remark="HEXISEQ_HOPPER=0 is set")
    import triton

    versions = ", ".join(guard.VERIFIED)
    why = f"Triton {triton.__version__}; the Hopper kernels are verified for {versions}"
    if guard.is_verified(triton.__version__):
        why = "the compiler spilled registers of a Hopper kernel"
    name = "hopper forward, portable backward" if taken[0] else "portable"
    return KernelPath(name, why, remark=f"the faster Hopper kernels do not run: {why}")


def _small_call_error(device: torch.device) -> float:
    """Return the relative error of forward's output and backward's dq in a small call."""
    from hexiseq_triton.kernels import attention_backward, attention_forward, row_dots

    generator = torch.Generator(device).manual_seed(0)
    q, k, v, do = (
        torch.randn(
            TOKENS, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16, generator=generator
        )
        for _ in range(4)
    )
    segments = tuple(whole_documents((TOKENS,)))
    call = (segments, segments, HeadMap(0, 1), AttentionOptions(CAUSAL, HEAD_DIM**-0.5))
    out, lse = torch.empty_like(q), torch.empty(HEADS, TOKENS, device=device)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    attention_forward(q, k, v, None, lse, *call, first=True, out=out)
    delta = row_dots(do, out)
    attention_backward(q, k, v, do, lse, delta, dq, dk, dv, *call, accumulate=False)

    q, k, v, do = (x.double().cpu() for x in (q, k, v, do))
    o, lse = torch.zeros_like(q), torch.full((HEADS, TOKENS), -torch.inf).double()
    reference.attention_forward(q, k, v, o, lse, *call)
    exact = [torch.zeros_like(x) for x in (q, k, v)]
    delta = (do * o).sum(-1).T.contiguous()
    reference.attention_backward(q, k, v, do, lse, delta, exact[0], exact[1], exact[2], *call)
    return max(
        float((found.double().cpu() - right).norm() / right.norm())
        for found, right in zip((out, dq, dk, dv), (o, *exact), strict=True)
    )
