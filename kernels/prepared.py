"""Launches that are worked out once: a call with the same forms only puts the tensors in.

Triton finds the compiled kernel by the type, size and alignment of each of some 40 arguments, which
takes longer than all else on the host. The forms fix all of these, so a prepared launch keeps the
kernel that Triton found the first time. The interpreter compiles nothing and finds it anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from hexiseq_triton.kernels.tilemap import TileMap


class Cut(Protocol):
    """How a descriptor cuts a tensor."""

    def of(self, tensor: torch.Tensor) -> Any:
        """Return the descriptor of a tensor."""
        ...


class Prepared:
    """A launch that lacks only its tensors.

    Args:
        kernel: the jitted kernel; its parameters are tensors, the tile map if there is one,
            scalars, and compile-time constants, in this order.
        grid: programs, in up to three dimensions.
        scalars: arguments after the tensors and the tile map.
        constants: compile-time arguments by name, num_warps and num_stages.
        tiles: the tile map.
        blocks: for each tensor how a descriptor cuts it, None for a plain pointer.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        scalars: Sequence[int | float],
        constants: Mapping[str, int | bool],
        *,
        tiles: TileMap | None = None,
        blocks: Sequence[Cut | None],
    ) -> None:
        self._kernel = kernel
        self._grid = (*grid, 1, 1)[:3]
        self._scalars = scalars
        self._constants = constants
        self._tiles = tiles
        self._blocks = blocks
        self._compiled: Any = None
        self._checked: list[_Checked | None] = []
        self._arrived = False
        after = len(blocks) + (tiles is not None) + len(scalars)
        self._compile_time = [constants[name] for name in kernel.arg_names[after:]]

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Launch on the current stream; the forms must be those it was prepared for."""
        if self._compiled is None:
            self._launch_first(tensors)
            return
        sources = [
            tensor if checked is None else checked.of(tensor)
            for tensor, checked in zip(tensors, self._checked, strict=True)
        ]
        self._compiled[self._grid](*sources, *self._tile_map(), *self._scalars, *self._compile_time)

    @property
    def num_spills(self) -> int:
        """Registers of a thread that stand in memory; known after the first launch on a card."""
        return 0 if self._compiled is None else self._compiled.n_spills

    def _launch_first(self, tensors: Sequence[torch.Tensor]) -> None:
        """Launch by way of Triton's own lookup, and keep what it found."""
        sources = [
            tensor if cut is None else cut.of(tensor)
            for tensor, cut in zip(tensors, self._blocks, strict=True)
        ]
        self._checked = [
            None if cut is None else _Checked.like(source)
            for source, cut in zip(sources, self._blocks, strict=True)
        ]
        launch = self._kernel[self._grid]
        self._compiled = launch(*sources, *self._tile_map(), *self._scalars, **self._constants)

    def _tile_map(self) -> Sequence[torch.Tensor]:
        """Return the tile map's table, if there is a map; wait for it until it has arrived."""
        if self._tiles is None:
            return ()
        if not self._arrived:
            ready = self._tiles.on_current_stream().ready
            self._arrived = ready is None or (
                not torch.cuda.is_current_stream_capturing()  # a query would break the graph
                and ready.query()
            )
        return (self._tiles.table,)


class _Checked(NamedTuple):
    """A descriptor without its tensor. What it was checked for holds for all of the same form."""

    kind: type[Any]
    fields: dict[str, Any]

    @classmethod
    def like(cls, descriptor: Any) -> _Checked:
        fields = {name: value for name, value in vars(descriptor).items() if name != "base"}
        return cls(type(descriptor), fields)

    def of(self, tensor: torch.Tensor) -> Any:
        """Return such a descriptor of a tensor, without checking it again."""
        descriptor = object.__new__(self.kind)
        vars(descriptor).update(self.fields, base=tensor)
        return descriptor
