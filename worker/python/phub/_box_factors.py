"""Sufficient factors to the box: it adds up the outer products, and makes the optimizer's steps.

A rank sends of a fully connected layer the errors of its output and its inputs, sample by sample,
in place of the weight's gradient (Poseidon, section 4.3), and gets the weight's new value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from phub._exchanged import Exchanged
from phub._factors import Linear, layers_of, refuse_made
from phub._options import Key, Option
from phub._tensors import DTYPES, memory_of
from phub._views import tensor_over
from phub.errors import InvalidError

Layers = dict[str, tuple[nn.Linear, int]]


def layers_in(
    model: nn.Module,
    factors: Mapping[str, int],
    keys: dict[str, int | Key],
    options: Mapping[str, Option],
) -> Layers:
    """By the weight's name: the module and its samples. Their keys become matrices.

    Raises InvalidError, or NotFoundError for a pattern that matches no weight.
    """
    if factors and options.get("memory_device") is not None:
        raise InvalidError("factors: the box gets them from the host: leave memory_device out")
    layers = layers_of(model, factors, may_be_on_gpu=True) if factors else {}
    for name, (_, samples) in layers.items():
        key = keys.get(name)
        if not isinstance(key, Key):
            raise InvalidError(f"factors: '{name}' is not one of the optimizer's parameters")
        keys[name] = replace(key, rank_limit=samples)
    return layers


@dataclass(eq=False)
class BoxFactors(Exchanged):
    """The weight of such a layer, on its way to the box and back. It has no gradient here."""

    samples: int = 0  # of a step, at most
    count: int = field(init=False, default=0)  # so far
    latest: int = field(init=False, default=-1)  # backward()
    sides: tuple[torch.Tensor, ...] = field(init=False, default=())  # that were lent

    def look(self) -> None:
        """As Exchanged: the worker has no memory for its gradient."""
        self.slot = torch.empty(0)
        self.left, self.right = (
            torch.empty(self.samples, size, device=self.tensor.device) for size in self.tensor.shape
        )
        self.result = tensor_over(
            self.worker.parameters(self.name), DTYPES[self.worker.parameter_dtype]
        ).view(self.tensor.shape)

    def add(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """These samples are a part of the step."""
        task = torch._C._current_graph_task_id()
        if task == self.latest:
            raise InvalidError(
                f"factors: layer '{self.name}' is used twice in a backward(), and its weight must "
                "be used once"
            )
        self.latest = task
        end = self.count + len(left)
        if end > self.samples:
            raise InvalidError(
                f"factors: layer '{self.name}' has {end} samples in a step, and there is room for "
                f"{self.samples}: give more in factors="
            )
        self.left[self.count : end].copy_(left)
        self.right[self.count : end].copy_(right)
        self.count = end

    @torch.no_grad()
    def _send(self, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            raise RuntimeError(
                f"factors: '{self.name}' has a gradient beside its factors: a weight must be used "
                "by its nn.Linear alone"
            )
        left, right = (side[: self.count] for side in (self.left, self.right))
        if self.worker.on_device:  # what the next step writes there comes behind this one's result
            if self.delay:  # or before it
                self.sides = left, right = left.clone(), right.clone()
            self.worker.on_device.push_factors(self.name, left, right)
        else:
            self.worker.push_factors(self.name, memory_of(left), memory_of(right))

    def end_step(self) -> None:
        """The next backward() is of the next step."""
        super().end_step()
        self.count = 0


class Layer:
    """A module whose backward() has factors in place of its weight's gradient."""

    def __init__(
        self, module: nn.Linear, mine: BoxFactors, on_factors: Callable[[Exchanged], None] | None
    ) -> None:
        """on_factors: called with `mine` when it has those of a backward(); None: nothing is."""
        self._module, self._on_factors = module, on_factors
        self._mine: BoxFactors | None = mine
        module.forward = self._forward  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy of the model, whose module computes as ever."""
        return {"_module": self._module, "_mine": None}

    def _forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self._mine is None or not torch.is_grad_enabled():
            return functional.linear(inputs, self._module.weight, self._module.bias)
        refuse_made(self._mine.name, self._module)
        result: Any = Linear.apply(inputs, self._module.weight, self._module.bias, self)  # type: ignore[no-untyped-call]
        return result  # type: ignore[no-any-return]

    def push(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """What Linear calls."""
        assert self._mine is not None
        self._mine.add(left, right)
        if self._on_factors:
            self._on_factors(self._mine)

    def remove(self) -> None:
        """The module's backward() has its weight's gradient again."""
        del self._module.forward
