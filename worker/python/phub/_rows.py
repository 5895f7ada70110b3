"""Parameters of whose gradients the rows are sent that are not zero: an embedding's."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from phub._exchanged import Exchanged
from phub._names import plain_name
from phub._numbers import whole_number
from phub._options import MAX_ROWS, Key
from phub._tensors import DTYPES, memory_of
from phub._views import tensor_over
from phub.errors import InvalidError, NotFoundError


def rows_in(
    model: nn.Module,
    rows: Mapping[str, int],
    lazy: Sequence[str] | str | None,
    named: Mapping[str, nn.Parameter],
    keys: dict[str, int | Key],
) -> set[str]:
    """The names of the parameters with sparse gradients. Their keys get a rows_limit.

    lazy: None: all, and none has a dense gradient (torch.optim.SparseAdam). Raises InvalidError, or
    NotFoundError for a pattern that matches none of them.
    """
    lazy = [lazy] if isinstance(lazy, str) else lazy
    _check(rows, [] if lazy is None else lazy)
    limits = {name: named[name].shape[0] for name in _sparse_weights(model) if name in named}
    for pattern, limit in rows.items():
        for name in _matching("rows", pattern, limits):
            if limit < 1:
                raise InvalidError(f"rows: '{name}' is to have {limit} rows in a step: at least 1")
            limits[name] = min(limit, named[name].shape[0])
    lazy_names = {name for pattern in lazy or () for name in _matching("lazy", pattern, limits)}
    if lazy is None:
        lazy_names = set(limits)
        for name in named:
            if name not in limits:
                raise InvalidError(
                    f"'{name}' has dense gradients, and SparseAdam is for those of "
                    "nn.Embedding(sparse=True): use Adam with lazy= for both"
                )
    for name, limit in limits.items():
        tensor = named[name]
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            raise InvalidError(
                f"'{name}' has sparse gradients, and is {tensor.dtype} on {tensor.device}: rows "
                "are sent of float32 parameters on the CPU; use sparse=False"
            )
        key = keys[name]
        assert isinstance(key, Key)
        keys[name] = replace(key, rows_limit=min(limit, MAX_ROWS), lazy=name in lazy_names)
    return set(limits)


def _check(rows: object, lazy: object) -> None:
    """Raises InvalidError: they are not what DistributedOptimizer takes."""
    if not isinstance(rows, Mapping) or not all(isinstance(pattern, str) for pattern in rows):
        raise InvalidError(
            f"rows={rows!r}: it is a number of rows by patterns of names, such as "
            '{"words.*": 4096}'
        )
    for pattern, limit in rows.items():
        whole_number(f"rows of '{pattern}'", limit, 64)
    if not isinstance(lazy, Collection) or not all(isinstance(pattern, str) for pattern in lazy):
        raise InvalidError(f'lazy={lazy!r}: it is patterns of names, such as ["words.*"]')


def _sparse_weights(model: nn.Module) -> list[str]:
    return [
        plain_name(f"{prefix}.weight" if prefix else "weight")
        for prefix, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    ]


def _matching(argument: str, pattern: str, names: Mapping[str, int]) -> list[str]:
    found = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    if not found:
        raise NotFoundError(
            f"{argument}: no parameter with sparse gradients matches '{pattern}'; there are "
            f"{', '.join(names) or 'none'} (nn.Embedding(sparse=True))"
        )
    return found


class SparseRows(Exchanged):
    """The weight of an embedding, on its way to the box and back."""

    def look(self) -> None:
        """As Exchanged: the worker has no memory for its gradient."""
        self.slot = torch.empty(0)
        self.result = tensor_over(
            self.worker.parameters(self.name), DTYPES[self.worker.parameter_dtype]
        ).view(self.tensor.shape)

    def _check_layout(self, gradient: torch.Tensor) -> None:
        if gradient.layout != torch.sparse_coo or gradient.sparse_dim() != 1:
            raise RuntimeError(
                f"the gradient of '{self.name}' is {gradient.layout}, and rows of it are sent: its "
                "weight must be used by its embedding alone, or with sparse=False"
            )

    @torch.no_grad()
    def _send(self, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            self.worker.push_null(self.name)
            return
        rows = gradient.coalesce()
        indices = rows.indices()[0].contiguous()
        self.worker.push_rows(self.name, memory_of(indices), memory_of(rows.values().contiguous()))
