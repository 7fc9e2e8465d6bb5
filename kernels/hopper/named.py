"""Named barriers, which the compiler does not know.

`mbarrier.arrive` makes a whole partition meet twice: before it, and before the next access to
shared memory, whichever that is. To arrive at a named barrier costs nothing but itself, and threads
that wait there also wait for each other. What it does not do is to count bytes of the copy engine,
and it has no phases: nobody may arrive again before those of the last time have all left, which
every use must make sure of.

Triton numbers its own from 0, one for each partition of several warps: 0 to 2 in these kernels.
"""

from __future__ import annotations

from hexiseq_triton.kernels.hopper.api import gl, gluon

CONSUMERS = gl.constexpr(256)
"""Threads of both consumers."""
CONSUMER_AND_PRODUCER = gl.constexpr(160)
"""Threads of one consumer and of the producer warp."""
ALL = gl.constexpr(288)
"""Threads of both consumers and of the producer warp."""


@gluon.jit
def arrive(barrier, THREADS: gl.constexpr):
    """Count as arrived at a barrier of `THREADS` threads, and go on."""
    gl.inline_asm_elementwise(
        "bar.arrive $1, $2; mov.u32 $0, 0;", "=r,r,n", [barrier, THREADS],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def meet(barrier, THREADS: gl.constexpr):
    """Wait until `THREADS` threads, with these, have come to a barrier."""
    gl.inline_asm_elementwise(
        "bar.sync $1, $2; mov.u32 $0, 0;", "=r,r,n", [barrier, THREADS],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def meet_if(needed, barrier, THREADS: gl.constexpr):
    """The same where `needed`, without a branch."""
    gl.inline_asm_elementwise(
        "{.reg .pred p; setp.ne.s32 p, $1, 0; @p bar.sync $2, $3; mov.u32 $0, 0;}", "=r,r,r,n",
        [needed.to(gl.int32), barrier, THREADS], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def take_turn(ID: gl.constexpr):
    """Wait at a barrier of both consumers until the other one has passed the turn."""
    gl.inline_asm_elementwise(
        "bar.sync $1, 256; mov.u32 $0, 0;", "=r,n", [ID], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def pass_turn(ID: gl.constexpr):
    """Let the other consumer go on at its barrier."""
    gl.inline_asm_elementwise(
        "bar.arrive $1, 256; mov.u32 $0, 0;", "=r,n", [ID], dtype=gl.int32, is_pure=False, pack=1
    )
