"""What a cluster would do if it were another one: throughput, cost per token, longest sequence.

For every variant the simulator's event engine judges the layouts that the search and the runnable
baselines come up with, and the fastest counts. Prices per GPU-hour are the user's, in whatever
currency they are; a step costs all GPUs for as long as it takes, idle ones too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hexiseq_triton.errors import ConfigError
from hexiseq_triton.planner.capacity import roomiest
from hexiseq_triton.planner.gpus import gpu_table
from hexiseq_triton.planner.layouts import out_of_memory
from hexiseq_triton.planner.longest import longest_seq_len
from hexiseq_triton.planner.models import ModelSpec
from hexiseq_triton.planner.plans import ExchangePlan
from hexiseq_triton.planner.problem import Problem
from hexiseq_triton.planner.reproduction.contenders import Contenders
from hexiseq_triton.planner.reproduction.judge import Judge
from hexiseq_triton.planner.simulator import Mode, simulate
from hexiseq_triton.planner.stages import Splitter
from hexiseq_triton.planner.variants import Variant, gpu_named
from hexiseq_triton.planner.workload import Workload

SECONDS_PER_HOUR = 3600
MILLION = 1e6


@dataclass(frozen=True)
class Outcome:
    """What came out for a variant. If nothing fits, `reason` says why and times are None.

    Attributes:
        variant: the cluster.
        price_per_hour: of all its GPUs together; None if that of a model is not known.
        longest_seq_len: the longest sequence that fits, at the same batch; 0 if none does.
        tokens_per_s: simulated.
        mfu: simulated.
        layout: what the fastest layout is called.
        reason: why there is none, or "".
        on_frontier: whether no other variant is faster and as cheap, or cheaper and as fast.
    """

    variant: Variant
    price_per_hour: float | None
    longest_seq_len: int
    tokens_per_s: float | None = None
    mfu: float | None = None
    layout: str = ""
    reason: str = ""
    on_frontier: bool = False

    @property
    def cost_per_million_tokens(self) -> float | None:
        if self.price_per_hour is None or self.tokens_per_s is None:
            return None
        return self.price_per_hour / SECONDS_PER_HOUR / self.tokens_per_s * MILLION


def judged(
    variants: Sequence[Variant],
    model: ModelSpec,
    workload: Workload,
    prices: Mapping[str, float],
    mode: Mode = "direct",
    done: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """Return what every variant comes to, in order.

    Args:
        variants: clusters.
        model: what is trained.
        workload: what a step consists of.
        prices: per GPU-hour, by GPU model; may be empty.
        mode: how keys travel; "direct" is what the runtime does.
        done: is told of every variant that is judged, which takes seconds each.
    """
    outcomes = []
    for each in variants:
        outcomes.append(_judged(each, model, workload, prices, mode))
        done(outcomes[-1])
    best = {id(each) for each in frontier(outcomes)}
    return [replace(each, on_frontier=id(each) in best) for each in outcomes]


def _judged(
    variant: Variant,
    model: ModelSpec,
    workload: Workload,
    prices: Mapping[str, float],
    mode: Mode,
) -> Outcome:
    problem = Problem(variant.cluster, model, workload, ExchangePlan())
    outcome = Outcome(variant, _price(variant, prices), longest_seq_len(problem))
    judge, contenders = Judge(mode), Contenders.of(problem)
    best = judge.fastest(contenders.runnable)
    if best is None:
        return replace(outcome, reason=out_of_memory(problem, roomiest(Splitter(problem))))
    found = simulate(best.cost, mode=mode, engine="event")
    return replace(
        outcome,
        tokens_per_s=found.tokens_per_s,
        mfu=found.mfu,
        layout=best.cost.layout.name,
    )


def _price(variant: Variant, prices: Mapping[str, float]) -> float | None:
    if any(gpu not in prices for gpu in variant.gpus):
        return None
    return sum(count * prices[gpu] for gpu, count in variant.gpus.items())


def frontier(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return the outcomes that no other beats in both cost and throughput, cheapest first."""
    priced = [
        (cost, -each.tokens_per_s, each)
        for each in outcomes
        if (cost := each.cost_per_million_tokens) is not None and each.tokens_per_s is not None
    ]
    best: list[Outcome] = []
    fastest = 0.0
    for _, slowness, each in sorted(priced, key=lambda entry: entry[:2]):
        if -slowness > fastest:
            fastest = -slowness
            best.append(each)
    return best


def prices_of(variants: Sequence[Variant], given: Sequence[str]) -> dict[str, float]:
    """Return prices per GPU-hour: those of the cluster file, and over them those of the user.

    Args:
        variants: where GPUs are named; the first has the file's prices.
        given: NAME=PRICE each, the name as in `variants.gpu_named`.

    Raises:
        ConfigError: if one cannot be read, stands twice, or names no GPU of any variant.
    """
    models = {name: each.cluster.gpus[name] for each in variants for name in each.gpus}
    found: dict[str, float] = {}
    for text in given:
        name, _, price = text.partition("=")
        try:
            value = float(price)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise ConfigError(f"--price is {text!r}; it is GPU=PRICE an hour, such as H100=2.5")
        gpu = gpu_named(name, models, gpu_table() | models, f"--price {text}")
        if gpu not in models:
            raise ConfigError(
                f"--price {text}: no variant has a {gpu}; there are {', '.join(sorted(models))}"
            )
        if gpu in found:
            raise ConfigError(f"--price {text}: {gpu} stands twice; give it once")
        found[gpu] = value
    return variants[0].cluster.prices | found


def unpriced(variants: Iterable[Variant], prices: Mapping[str, float]) -> list[str]:
    """Return the GPU models that have no price, sorted."""
    return sorted({gpu for each in variants for gpu in each.gpus if gpu not in prices})
