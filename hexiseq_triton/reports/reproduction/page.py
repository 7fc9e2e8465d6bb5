"""docs/reproduction.md: the papers' evaluation in the simulator, beside the papers' figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hexiseq_triton.planner.gpus import GpuSpec, Work
from hexiseq_triton.planner.reproduction.checks import checks
from hexiseq_triton.planner.reproduction.experiments import Named
from hexiseq_triton.planner.reproduction.rows import Row
from hexiseq_triton.planner.reproduction.runner import Result
from hexiseq_triton.planner.reproduction.statistics import rows_of
from hexiseq_triton.reports.reproduction.beside import Group, beside_the_paper
from hexiseq_triton.reports.reproduction.markdown import table
from hexiseq_triton.reports.reproduction.sections import SECTIONS

HEAD = """\
# The papers' evaluation, simulated

Made by `hexiseq reproduce` from [bench/experiments](../bench/experiments/) and what it keeps in
[bench/results/reproduction](../bench/results/reproduction/), where plots and a `summary.json` with
a row a cell lie too. **Nothing here was measured on a GPU.** The [simulator](simulator.md)'s event
engine judges every layout, except where a section says otherwise.

```
hexiseq reproduce [--only S2,P4] [--jobs 2] [--fresh] [--experiments FOLDER]
```

in a checkout of the repository. Cells that are known are kept, and a run that was ended goes on. An
experiment of one's own is one more [YAML file](../planner/reproduction/experiments.py).

- **ours**: of the layouts that the search looks at, and of baselines that the runtime can carry
  out, the fastest in the simulator. `hexiseq plan` chooses by the cost model, which adds up closed
  forms: `plan's choice` is how much longer that one's step simulates.
- **Paper's baselines**: Ring, zigzag Ring, Ulysses and USP on all GPUs, each over all its degrees,
  placements, replicas and passes. The best by the cost model are simulated; their keys travel as
  the runtime's do or round a ring, whichever is faster. **Any** is every baseline of the planner,
  homogeneous islands and the fastest GPUs alone among them.
- **Modes**: `direct` is the runtime's exchange, and the mode of every figure that names none. In
  `async`, `streamed` and `lockstep` keys of ours and of the baselines go round a ring; `streamed`
  is one that no library has. All-gathers and rings of rings stay what they are.
- **bound**: the baseline's step over the lower bound of all plans (`planner.bound`), which no
  speed-up can exceed. **reached** is the share of it.
- **exposed** is the share of the step in which ranks only wait for transfers, on average.
- A cell is **compute-bound** if ring attention computes longer on a block of keys than a NIC takes
  to bring it, with the largest blocks that batch and memory allow: a rule that looks at no plan.
- The paper's full text was not at hand: figures from a summary are second-hand. Model shapes, GPU
  counts where the paper gives none, and GPU rates are ours. Rates are the planner's table as it
  was before the first run; links are 25 GB/s between nodes.
"""
_WORKS: tuple[Work, ...] = ("gemm", "attention_forward", "attention_backward")


def page(named: Sequence[Named], results: Sequence[Result]) -> str:
    """Return the page.

    Args:
        named: the experiments.
        results: all that was computed; experiments without any are left out.
    """
    rows = [row for result in results for row in result.rows]
    present = [each for each in named if rows_of(each, rows)]
    cpu_seconds = sum(result.cpu_seconds for result in results)
    codes = Counter(result.code for result in results)
    sources = ", ".join(f"{code} ({count} cells)" for code, count in codes.items())
    lines = [
        HEAD,
        f"All cells took {cpu_seconds:,.0f} s of CPU time. Planner's sources: {sources}.",
    ]
    lines += ["", "## What was asked, and what came out", ""]
    lines += [f"- {check}" for check in checks(present, rows)]
    for group in groups(present, rows):
        lines += beside_the_paper(group)
    lines += ["", "## Rates of the GPUs", "", *_rates(present)]
    for each in present:
        lines += ["", f"## {each.name}: {each.experiment.title}", ""]
        lines += [f"Ours, not the paper's: {each.experiment.ours}.", *_sources(each), ""]
        lines += SECTIONS[each.experiment.kind](each, rows_of(each, rows))
    return "\n".join(lines).rstrip() + "\n"


def groups(named: Sequence[Named], rows: Sequence[Row]) -> list[Group]:
    """Return the comparisons that are averaged together."""
    by_name: dict[str, list[Named]] = {}
    for each in named:
        if each.experiment.kind == "comparison" and each.experiment.group is not None:
            by_name.setdefault(each.experiment.group, []).append(each)
    return [Group(name, members, rows) for name, members in by_name.items()]


def _sources(named: Named) -> list[str]:
    """Say where the paper's figures of single cells are from."""
    figures = [f for f in named.experiment.paper if f.statistic == "cell"]
    if not figures:
        return []
    return [f"The paper's {'; '.join(f'{f.value:g} from {f.source}' for f in figures)}."]


def _rates(named: Sequence[Named]) -> list[str]:
    """Return a table of the GPUs of all experiments; one name has one meaning in each of them."""
    cards: dict[str, GpuSpec] = {}
    for each in named:
        for cluster in each.clusters.values():
            cards = dict(cluster.gpus) | cards
    lines = []
    for name, gpu in sorted(cards.items()):
        rates = [gpu.rate(work) for work in _WORKS]
        lines.append(
            [
                name,
                f"{gpu.dense_tflops.value:g}",
                *(f"{rate.value / 1e12:.0f}" for rate in rates),
                f"{gpu.memory_gb.value:g}",
                f"{gpu.in_node_gb_per_s:g}",
                f"{gpu.dense_tflops.source} ({gpu.dense_tflops.origin})",
                f"{gpu.efficiency.attention_forward.source} ({rates[1].origin})",
            ]
        )
    titles = ["GPU", "dense peak", "products", "attention", "its backward", "GB", "in node GB/s",
              "peak from", "attention's share from"]  # fmt: skip
    return [*table(titles, lines), "", "Rates are TFLOP/s reached."]
