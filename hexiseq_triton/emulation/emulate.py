"""Slow ranks where all are fast: fewer multiprocessors, less memory, delayed links. For tests.

    multiprocessors   a CUDA green context: everything launched on the rank's stream runs on some of
                      the GPU. NCCL's kernels run outside it, on multiprocessors of their own, and
                      memory bandwidth, cache and clocks stay those of the whole GPU
    memory            PyTorch's allocator refuses what goes beyond the cap
    links             a transfer ends no sooner than a link of the given rate would let it

Whatever such a rank measures or writes is labelled "emulated".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hexiseq_triton.errors import ConfigError
from hexiseq_triton.wording import counted

if TYPE_CHECKING:
    from hexiseq_triton.context import ParallelContext


@dataclass(frozen=True)
class Emulation:
    """What is emulated, one value a rank each; None leaves that as it is.

    `sms` are multiprocessors (a whole GPU's or more: all of them), `memory_gb` GB (10^9 bytes) that
    tensors may take, `link_gb_per_s` what a rank receives, GB/s.
    """

    sms: tuple[int, ...] | None = None
    memory_gb: tuple[float, ...] | None = None
    link_gb_per_s: tuple[float, ...] | None = None

    @classmethod
    def parse(cls, sms: str | None, memory_gb: str | None, links: str | None) -> Emulation | None:
        """Return what the command line asks for: values with commas between them; None if nothing.

        Raises:
            ConfigError: if a value is no positive number.
        """
        if sms is None and memory_gb is None and links is None:
            return None
        counts = _numbers("--emulate-sms", sms)
        if counts is not None and any(count != int(count) for count in counts):
            raise ConfigError(f"--emulate-sms is {sms!r}; multiprocessors are whole numbers")
        return cls(
            None if counts is None else tuple(int(count) for count in counts),
            _numbers("--emulate-memory-gb", memory_gb),
            _numbers("--emulate-link-gb-per-s", links),
        )

    @property
    def _options(self) -> list[tuple[str, tuple[float, ...]]]:
        """The options that were given, with their values."""
        every = (
            ("--emulate-sms", self.sms),
            ("--emulate-memory-gb", self.memory_gb),
            ("--emulate-link-gb-per-s", self.link_gb_per_s),
        )
        return [(option, values) for option, values in every if values is not None]

    @property
    def arguments(self) -> list[str]:
        """What to type for it, as `parse` takes it."""
        texts = ((option, ",".join(f"{v:g}" for v in values)) for option, values in self._options)
        return [word for pair in texts for word in pair]

    def check(self, world_size: int, device: torch.device) -> None:
        """Refuse what doesn't fit the world or the device.

        Raises:
            ConfigError: naming the option, what it has, and what fits.
        """
        for option, values in self._options:
            if len(values) != world_size:
                raise ConfigError(
                    f"{option} has {counted(len(values), 'value')} for "
                    f"{counted(world_size, 'rank')}; give one a rank"
                )
        if device.type != "cuda" and (self.sms or self.memory_gb):
            raise ConfigError(
                f"--emulate-sms and --emulate-memory-gb need CUDA; this rank runs on "
                f"{device.type}. On a CPU give processes fewer threads instead (OMP_NUM_THREADS)"
            )

    @property
    def delays_links(self) -> bool:
        """Whether links are slow: only messages can be delayed, not what GPUs write directly."""
        return self.link_gb_per_s is not None

    def delay_links(self, context: ParallelContext) -> None:
        """Delay what a context's rank receives, if links are emulated."""
        if self.link_gb_per_s is not None:
            from hexiseq_triton.emulation.links import delay_links

            delay_links(context, self.link_gb_per_s[context.rank])

    @contextmanager
    def applied(self, rank: int, world_size: int, device: torch.device) -> Iterator[str]:
        """Emulate on this rank what runs inside; yields the rank's label, "" for nothing emulated.

        Links are delayed by `delay_links`, once there is a context.

        Raises:
            ConfigError: as `check`; or if a green context cannot be made.
        """
        self.check(world_size, device)
        parts = []
        whole = torch.cuda.current_stream(device) if device.type == "cuda" else None
        try:
            if self.memory_gb is not None:
                _cap_memory(self.memory_gb[rank], device)
                parts.append(f"{self.memory_gb[rank]:g} GB")
            if self.sms is not None and self.sms[rank] < _all_sms(device):
                from hexiseq_triton.emulation.multiprocessors import confined_stream

                stream, count = confined_stream(self.sms[rank], device)
                torch.cuda.set_stream(stream)
                parts.append(f"{count} of {_all_sms(device)} SMs")
            if self.link_gb_per_s is not None:
                parts.append(f"links of {self.link_gb_per_s[rank]:g} GB/s")
            yield f"emulated: {', '.join(parts)}" if parts else ""
        finally:
            if whole is not None:
                torch.cuda.synchronize(device)
                torch.cuda.set_stream(whole)
            if self.memory_gb is not None:
                torch.cuda.set_per_process_memory_fraction(1.0, device)


@contextmanager
def emulated(
    emulation: Emulation | None, rank: int, world_size: int, device: torch.device
) -> Iterator[str]:
    """Apply `emulation` if there is one; yields the rank's label."""
    if emulation is None:
        yield ""
        return
    with emulation.applied(rank, world_size, device) as label:
        yield label


def _numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"{option} is {text!r}; it is numbers with commas between them, one a rank"
        ) from error
    if not all(0 < value < float("inf") for value in values):
        raise ConfigError(f"{option} is {text!r}; every number must be above 0")
    return values


def _all_sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _cap_memory(memory_gb: float, device: torch.device) -> None:
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, memory_gb * 1e9 / total), device)
