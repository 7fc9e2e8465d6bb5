"""Which item of work a program does next: one of its own list, then what others have not begun.

Lists are made so that programs end together. But where another kernel holds a multiprocessor, its
program begins when the first of the others has ended, and alone would take as long as they did. So
memory counts what is taken of each list, and a program at the end of its own takes from the list
that has most left: work stealing.
"""

from __future__ import annotations

from hexiseq_triton.kernels.hopper.api import gl, gluon
from hexiseq_triton.kernels.hopper.blocks import num_items


@gluon.jit
def _lanes():
    return gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def count_item(taken, program):
    """Count one more item of a program's list as taken; return how many were before."""
    # by a vector: what a scalar atomic addition returns passes through shared memory
    first = _lanes() == 0
    one = gl.where(first, 1, 0)
    before = gl.atomic_add(taken + program + one - one, one, mask=first, sem="relaxed")
    return gl.sum(gl.where(first, before, 0), 0)


@gluon.jit
def _fullest(taken, total, programs, program):
    """Return the list that has most left, and how much; of equals the next one after `program`,
    so that not all take from the same."""
    best = 0
    for begin in range(0, programs, 32):  # wider, it needs registers that the producer lacks
        distance = begin + _lanes()
        inside = distance < programs
        other = program + distance
        other = gl.where(other < programs, other, other - programs)
        count = gl.load(taken + other, mask=inside, other=0, volatile=True)
        left = gl.maximum(num_items(total, programs, other) - count, 0)
        rank = gl.where(inside, left * programs + programs - 1 - distance, 0)
        best = gl.maximum(best, gl.max(rank, 0))
    left = best // programs
    other = program + programs - 1 - (best - left * programs)
    return gl.where(other < programs, other, other - programs), left


@gluon.jit
def take_item(count, taken, total, programs, program):
    """Return (list, number in it) of the item that this program does next; number -1 after the
    last one of all lists.

    Args:
        count: what `count_item` returned for the program's own list.
        taken: `zero_counters`, of which each of `programs` has one.
        total: items of all lists, as `num_items` shares them out.
    """
    owner = program
    left = gl.where(count < num_items(total, programs, program), 0, 1)
    while left > 0:
        count = -1
        owner, left = _fullest(taken, total, programs, program)
        if left > 0:
            found = count_item(taken, owner)
            if found < num_items(total, programs, owner):  # nobody was faster
                count = found
                left = 0
    return owner, count
