"""Ranks that measured alike are one GPU model; one that is off gets a name of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import median

from hexiseq_triton.planner.gpus import gpu_by_device_name
from hexiseq_triton.profiling.compute import Rate

TOLERANCE = 0.05
"""How far a rank's rates, or memory, may be from those of its model."""


@dataclass(frozen=True)
class RankProfile:
    """What one rank measured of itself."""

    rank: int
    host: str
    device: str
    memory_bytes: float
    copy_bytes_per_s: float
    rates: tuple[Rate, ...]
    emulated: str = ""

    @property
    def token_wise(self) -> float:
        """Geometric mean of its token-wise rates, FLOP/s."""
        return _mean([r.flops_per_s for r in self.rates if r.work.startswith("gemm")])

    @property
    def attention(self) -> float:
        """Geometric mean of its attention rates, FLOP/s."""
        return _mean([r.flops_per_s for r in self.rates if r.work.startswith("attention")])

    @property
    def figures(self) -> tuple[float, float, float]:
        return self.token_wise, self.attention, self.memory_bytes


@dataclass(frozen=True)
class GpuClass:
    """Ranks that count as one GPU model; each figure is their median."""

    name: str
    ranks: tuple[int, ...]
    device: str
    memory_bytes: float
    copy_bytes_per_s: float
    rates: tuple[Rate, ...]
    emulated: str = ""


def classes_of(profiles: Sequence[RankProfile]) -> tuple[list[GpuClass], list[str]]:
    """Return the GPU models found, and a line for each that is off the others of its name."""
    found: list[GpuClass] = []
    lines: list[str] = []
    for device in dict.fromkeys(profile.device for profile in profiles):
        base = gpu_by_device_name(device) or device.replace(" ", "-")
        alike = _alike([profile for profile in profiles if profile.device == device])
        for number, members in enumerate(alike):
            name = base + (f".{number + 1}" if number else "")
            named = _class(name + ("-emulated" if members[0].emulated else ""), members)
            found.append(named)
            if number:
                lines.append(_difference(named, members, alike[0]))
    return sorted(found, key=lambda each: each.ranks), lines


def _alike(profiles: Sequence[RankProfile]) -> list[list[RankProfile]]:
    """Put alike ranks together; real GPUs before emulated ones, then the most ranks first."""
    classes: list[list[RankProfile]] = []
    for profile in sorted(profiles, key=lambda p: (-p.token_wise, p.rank)):
        home = next((members for members in classes if _fits(profile, members)), None)
        if home is None:
            classes.append([profile])
        else:
            home.append(profile)
    return sorted(classes, key=lambda members: (bool(members[0].emulated), -len(members)))


def _fits(profile: RankProfile, members: Sequence[RankProfile]) -> bool:
    if profile.emulated != members[0].emulated:
        return False
    medians = (median(values) for values in zip(*(m.figures for m in members), strict=True))
    return all(
        abs(figure / middle - 1) <= TOLERANCE
        for figure, middle in zip(profile.figures, medians, strict=True)
    )


def _class(name: str, members: Sequence[RankProfile]) -> GpuClass:
    by_key: dict[tuple[str, int, int | None], list[Rate]] = {}
    for member in members:
        for rate in member.rates:
            by_key.setdefault(rate.key, []).append(rate)
    rates = tuple(
        Rate(same[0].work, same[0].tokens, median(r.flops_per_s for r in same), same[0].head_dim)
        for same in by_key.values()
    )
    return GpuClass(
        name=name,
        ranks=tuple(sorted(member.rank for member in members)),
        device=members[0].device,
        memory_bytes=median(member.memory_bytes for member in members),
        copy_bytes_per_s=median(member.copy_bytes_per_s for member in members),
        rates=rates,
        emulated=members[0].emulated,
    )


def _difference(
    named: GpuClass, members: Sequence[RankProfile], others: Sequence[RankProfile]
) -> str:
    shares = [
        median(m.figures[i] for m in members) / median(o.figures[i] for o in others)
        for i in range(3)
    ]
    ranks = ", ".join(map(str, named.ranks))
    reference = ", ".join(str(rank) for rank in sorted(other.rank for other in others))
    why = f" ({named.emulated})" if named.emulated else ""
    return (
        f"rank{'s' * (len(members) > 1)} {ranks} ({named.device}): {shares[0]:.0%} of the "
        f"token-wise rate, {shares[1]:.0%} of the attention rate and {shares[2]:.0%} of the memory "
        f"of rank{'s' * (len(others) > 1)} {reference}{why}: named {named.name}"
    )


def _mean(values: Sequence[float]) -> float:
    return exp(sum(log(value) for value in values) / len(values))
