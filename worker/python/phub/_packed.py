"""Gradients of a bucket, cut into a part for each process of a host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn


def part_of(parameter: nn.Parameter, size: int) -> nn.Parameter:
    """What one of so many processes has of it, flat. The last ones' have less in them, or none."""
    elements = -(-parameter.numel() // size)
    return nn.Parameter(torch.zeros(elements, dtype=parameter.dtype, device=parameter.device))


class Packed:
    """Gradients in rows, one of each process, in which its parts are one behind the other.

    It is also the bucket that a process exchanges: in place of parameters and gradients it has its
    parts. Behind the end of a gradient its last rows are zero.
    """

    def __init__(self, index: int, parts: Mapping[str, nn.Parameter], size: int) -> None:
        """index: the bucket's. parts: of one process, by the parameters' names."""
        self.names = list(parts)
        self._parts, self._index, self._is_last = list(parts.values()), index, False
        self._columns = [part.numel() for part in self._parts]
        self.rows = self._parts[0].new_zeros(size, sum(self._columns), requires_grad=False)
        self.mine = self._parts[0].new_zeros(sum(self._columns), requires_grad=False)
        self._of_each = torch.split(self.rows, self._columns, 1)
        self._gradients: Sequence[torch.Tensor] = ()

    # ---- As DDPState.exchange reads it.

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._is_last

    def buffer(self) -> torch.Tensor:
        return self.mine

    def parameters(self) -> list[nn.Parameter]:
        return self._parts

    def gradients(self) -> list[torch.Tensor]:
        return list(torch.split(self.mine, self._columns))

    # ---- The whole gradients.

    def begin(self, gradients: Sequence[torch.Tensor], *, is_last: bool = False) -> None:
        """gradients: of this step, in the order of the parts; take() writes to them."""
        self._gradients, self._is_last = gradients, is_last

    @torch.no_grad()
    def fill(self, scale: float) -> None:
        """The rows are of the gradients, times a number."""
        for gradient, rows in zip(self._gradients, self._of_each, strict=True):
            for place, given in _pieces(rows, gradient.flatten()):
                torch.mul(given, scale, out=place)
            full, rest = divmod(gradient.numel(), rows.shape[1])
            for row in rows[full:]:  # what is behind the end: few elements
                row[rest:].zero_()
                rest = 0

    @torch.no_grad()
    def take(self) -> None:
        """The gradients are what the rows have."""
        for gradient, rows in zip(self._gradients, self._of_each, strict=True):
            flat = gradient.flatten()  # a copy if it lies in another order
            for place, into in _pieces(rows, flat):
                into.copy_(place)
            if flat.data_ptr() != gradient.data_ptr() or not gradient.is_contiguous():
                gradient.copy_(flat.view(gradient.shape))
        self._gradients = ()


def _pieces(rows: torch.Tensor, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of a gradient: places in the rows, and what belongs there."""
    columns = rows.shape[1]
    full = len(flat) // columns
    yield rows[:full], flat[: full * columns].view(full, columns)
    if len(flat) > full * columns:
        yield rows[full, : len(flat) - full * columns], flat[full * columns :]
