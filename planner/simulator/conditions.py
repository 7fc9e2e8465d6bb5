"""What differs from the cost model's machine: noise, slow ranks, thin uplinks, copy engines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from hexiseq_triton.errors import ConfigError


@dataclass(frozen=True)
class Conditions:
    """How the machine is to behave.

    Attributes:
        jitter: spread of every operation's length: its logarithm is normal with this standard
            deviation, its mean is 1.
        seed: of the jitter; the same seed gives the same result.
        stragglers: for some ranks, how many times longer they compute.
        oversubscription: what the NICs of a node send together, over what its uplink carries.
        copy_engine: whether copy engines move keys and values inside a node. Then no
            multiprocessor does, and computing is not slowed by them.
    """

    jitter: float = 0.0
    seed: int = 0
    stragglers: Mapping[int, float] = field(default_factory=dict)
    oversubscription: float = 1.0
    copy_engine: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.jitter < 1:
            raise ConfigError(f"jitter is {self.jitter}; it is a spread from 0 to below 1")
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}; it is a whole number from 0")
        if not (self.oversubscription >= 1 and math.isfinite(self.oversubscription)):
            raise ConfigError(
                f"oversubscription is {self.oversubscription}; 1 is none, 2 halves the uplinks"
            )
        for rank, factor in self.stragglers.items():
            if not (factor > 0 and math.isfinite(factor)):
                raise ConfigError(
                    f"stragglers: rank {rank} has factor {factor}; 2 computes half as fast"
                )

    def check_ranks(self, world_size: int) -> None:
        """Check that stragglers are ranks.

        Raises:
            ConfigError: naming the rank and how many there are.
        """
        for rank in self.stragglers:
            if not 0 <= rank < world_size:
                raise ConfigError(
                    f"stragglers: there is no rank {rank}; ranks are 0 to {world_size - 1}"
                )
