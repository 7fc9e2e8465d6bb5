"""Baselines: what others would do with the same GPUs, judged by the same evaluator as ours.

    ring, zigzag_ring       groups of one; contiguous runs, or two mirrored pieces each
    ulysses                 one group in each replica
    usp                     cp groups of hp ranks, head-first or context-first
    loongtrain_*            as usp, with KV going round two nested rings
    megatron_*              Megatron's context parallelism: p2p, all-gather, all-to-all, and both
    equal_split             groups inside nodes, tokens and heads as equal as whole numbers allow
    fastest_only            as usp, on the GPUs of the fastest models; the others are idle
    proportional            as usp, with tokens in proportion to each GPU's speed
    islands                 the GPUs of each model form replicas of their own

Each is tuned over its degrees, its placement, the order of its ranks, replicas and passes, all at
the workload's batch. Ring, zigzag, Ulysses and USP run here, with the runtime's exchange, and so
are candidates for the answer; where `Layout.executable` is False, only the price is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from hexiseq_triton.errors import InfeasibleError
from hexiseq_triton.planner.cost import Cost, evaluate
from hexiseq_triton.planner.equal import best_equal_splits
from hexiseq_triton.planner.grids import Shape, shapes, speeds
from hexiseq_triton.planner.islands import islands
from hexiseq_triton.planner.problem import Problem
from hexiseq_triton.planner.tuner import Tuner


@dataclass(frozen=True)
class Priced:
    """A baseline's best layout, or why it has none. With a layout, the reason is its name."""

    cost: Cost | None
    reason: str

    @property
    def executable(self) -> bool:
        """Whether there is a layout and the runtime can carry it out."""
        return self.cost is not None and self.cost.layout.executable


def prices(problem: Problem) -> dict[str, Priced]:
    """Return all baselines' prices; what several of them look at is evaluated once."""
    tuner = Tuner(problem)
    return {name: _price(tuner, name) for name in BASELINES}


def price(problem: Problem, baseline: str) -> Priced:
    """Return the fastest layout of a baseline that fits in memory."""
    return _price(Tuner(problem), baseline)


def _price(tuner: Tuner, baseline: str) -> Priced:
    try:
        costs = BASELINES[baseline](tuner)
    except InfeasibleError as error:
        return Priced(None, str(error))
    fitting = [cost for cost in costs if cost.fits]
    if fitting:
        best = min(fitting, key=lambda cost: cost.step_seconds)
        return Priced(best, best.layout.name)
    return Priced(None, out_of_memory(tuner.problem, min(costs, key=excess)))


def excess(cost: Cost) -> float:
    """Return the largest share of its limit that any rank needs."""
    return float((cost.memory_bytes / cost.memory_limit).max())


def out_of_memory(problem: Problem, cost: Cost) -> str:
    """Say which rank's memory binds, what it needs, and what it may use."""
    rank = cost.fullest_rank
    device = problem.cluster.devices[rank]
    needed, limit = cost.memory_bytes[rank] / 1e9, cost.memory_limit[rank] / 1e9
    return (
        f"out of memory: rank {rank} ({device.gpu} of node {device.node}) needs {needed:.1f} GB "
        f"and may use {limit:.1f} GB"
    )


# -------------------------------------------------------------------- the baselines


def _ring(tuner: Tuner) -> list[Cost]:
    shapes = (replace(shape, arrangement="contiguous") for shape in _shapes(tuner, hp=1))
    return tuner.best_grid(shapes, tuner.ranks)


def _zigzag_ring(tuner: Tuner) -> list[Cost]:
    return tuner.best_grid(_shapes(tuner, hp=1), tuner.ranks)


def _ulysses(tuner: Tuner) -> list[Cost]:
    return _one_group(tuner, tuner.problem.model.heads, "query heads")


def _megatron_a2a(tuner: Tuner) -> list[Cost]:
    return _one_group(tuner, tuner.problem.model.kv_heads, "KV heads")


def _one_group(tuner: Tuner, heads: int, what: str) -> list[Cost]:
    found = [shape for shape in shapes(tuner.problem, len(tuner.ranks), heads) if shape.cp == 1]
    if not found:
        raise InfeasibleError(
            f"{heads} {what} do not divide by {len(tuner.ranks)} ranks, nor by those of any "
            "number of equal replicas that the batch allows"
        )
    return tuner.best_grid(found, tuner.ranks)


def _usp(tuner: Tuner) -> list[Cost]:
    return tuner.best_grid(_placed(_shapes(tuner)), tuner.ranks)


def _proportional(tuner: Tuner) -> list[Cost]:
    shapes = (replace(shape, proportional=True) for shape in _placed(_shapes(tuner)))
    return tuner.best_grid(shapes, tuner.ranks)


def _loongtrain_head_first(tuner: Tuner) -> list[Cost]:
    shapes = (replace(shape, exchange="double_ring") for shape in _shapes(tuner))
    return tuner.best_grid(shapes, tuner.ranks)


def _loongtrain_context_first(tuner: Tuner) -> list[Cost]:
    shapes = (
        replace(shape, exchange="double_ring", context_first=True) for shape in _shapes(tuner)
    )
    return tuner.best_grid(shapes, tuner.ranks)


def _megatron_p2p(tuner: Tuner) -> list[Cost]:
    shapes = (replace(shape, exchange="rotation") for shape in _shapes(tuner, hp=1))
    return tuner.best_grid(shapes, tuner.ranks)


def _megatron_all_gather(tuner: Tuner) -> list[Cost]:
    shapes = (replace(shape, exchange="all_gather") for shape in _shapes(tuner, hp=1))
    return tuner.best_grid(shapes, tuner.ranks)


def _megatron_a2a_p2p(tuner: Tuner) -> list[Cost]:
    problem = tuner.problem
    both = [
        replace(shape, exchange="rotation")
        for shape in shapes(problem, len(tuner.ranks), problem.model.kv_heads)
        if min(shape.cp, shape.hp) > 1
    ]
    if not both:
        raise InfeasibleError(
            f"{len(tuner.ranks)} ranks in no number of equal replicas make several groups of "
            f"several ranks that divide {problem.model.kv_heads} KV heads"
        )
    return tuner.best_grid(both, tuner.ranks)


def _equal_split(tuner: Tuner) -> list[Cost]:
    return best_equal_splits(tuner.problem)


def _fastest_only(tuner: Tuner) -> list[Cost]:
    problem = tuner.problem
    speed = speeds(problem)
    by_model: dict[str, list[int]] = {}
    for rank in sorted(tuner.ranks, key=lambda rank: (-speed[rank], rank)):
        by_model.setdefault(problem.cluster.devices[rank].gpu, []).append(rank)
    if len(by_model) == 1:
        raise InfeasibleError("all GPUs are of one model; there is no slower one to leave out")
    kept: list[int] = []
    costs: list[Cost] = []
    for ranks in list(by_model.values())[:-1]:
        kept += ranks
        members = tuple(sorted(kept))
        found = shapes(problem, len(members), problem.model.heads)
        to_beat = min((cost.step_seconds for cost in costs if cost.fits), default=float("inf"))
        costs += tuner.best_grid(_placed(found), members, to_beat)
    return costs


def _islands(tuner: Tuner) -> list[Cost]:
    found = [evaluate(tuner.problem, layout) for layout in islands(tuner.problem)]
    if not found:
        raise InfeasibleError("out of memory: no GPU model holds a sequence by itself")
    return found


def _shapes(tuner: Tuner, hp: int | None = None) -> Iterator[Shape]:
    """Yield all shapes over all ranks, or those of one hp."""
    for shape in shapes(tuner.problem, len(tuner.ranks), tuner.problem.model.heads):
        if hp in (None, shape.hp):
            yield shape


def _placed(shapes: Iterable[Shape]) -> Iterator[Shape]:
    """Yield each shape head-first, and context-first where that differs."""
    for shape in shapes:
        yield shape
        if min(shape.cp, shape.hp) > 1:
            yield replace(shape, context_first=True)


BASELINES: dict[str, Callable[[Tuner], list[Cost]]] = {
    "ring": _ring,
    "zigzag_ring": _zigzag_ring,
    "ulysses": _ulysses,
    "usp": _usp,
    "loongtrain_head_first": _loongtrain_head_first,
    "loongtrain_context_first": _loongtrain_context_first,
    "megatron_p2p": _megatron_p2p,
    "megatron_all_gather": _megatron_all_gather,
    "megatron_a2a": _megatron_a2a,
    "megatron_a2a_p2p": _megatron_a2a_p2p,
    "equal_split": _equal_split,
    "fastest_only": _fastest_only,
    "proportional": _proportional,
    "islands": _islands,
}
