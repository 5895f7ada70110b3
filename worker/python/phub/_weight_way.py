"""A weight that goes whole in some steps, and as factors in others: see _ways.py."""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from phub._factors import Linear, add_products, is_summed
from phub._measured import Clock
from phub._options import Key
from phub._views import tensor_over
from phub.errors import InvalidError
from phub.worker import Worker

_WHOLE = -1.0  # in place of the number of samples
_SHRUNK = 0.75  # of the samples that were planned with: others may be better


class All(Protocol):
    """What its weights need of the choice."""

    worker: Worker  # whose keys have the gradients
    clock: Clock

    def is_due(self) -> bool:
        """Whether the next backward() is that of an exchange."""

    def share(self) -> float:
        """What a product counts in the result of a step, when its factors are here."""


class Weight:
    """A weight of which there is a choice, of an nn.Linear."""

    def __init__(self, name: str, module: nn.Linear, ways: All) -> None:
        self.name, self._module, self.weight = name, module, module.weight
        self.samples = 0  # of the latest step
        self.planned = 0  # the same, when the choice was made
        self._count = 0  # of this one, so far
        self._limit = 0  # of samples that there is room for; 0: it goes whole
        self._stored = 0  # pairs of this step that are in _own
        self._is_local = False  # there was a backward() without an exchange since the latest one
        self._accumulates = False  # this step's gradient is that of such ones, too
        self._is_whole = False  # this rank's gradient goes whole in this step
        self._ways: All | None = ways
        self._factors: Worker
        self._names: tuple[str, ...]
        self._own: torch.Tensor  # of this rank, to be sent
        self._all: list[torch.Tensor]  # of all ranks
        self._gradient: torch.Tensor  # where the result goes
        self._some_are_whole = False

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.weight.shape[0], self.weight.shape[1]

    def join(self) -> None:
        """From now on samples are counted."""
        self._module.forward = self._forward  # type: ignore[assignment]
        with torch.enable_grad():
            view = self.weight.view_as(self.weight)
        assert view.grad_fn
        self._node = view.grad_fn.next_functions[0][0]
        self._hook = self.weight.register_hook(self._note_gradient)  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """The module computes as ever."""
        self._ways = None
        self._hook.remove()

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy of the model, whose module computes as ever."""
        return {"_module": self._module, "_ways": None}

    def keys(self, samples: int, ranks: int) -> dict[str, Key]:
        """Of each rank: its factors, and at last how many samples they are of."""
        size = samples * sum(self.weight.shape) + 1
        return {f"{self.name}/factors/{rank}": Key(size) for rank in range(ranks)}

    def follow(self, samples: int, factors: Worker | None) -> None:
        """Goes as factors of so many samples at most, in this job; 0: whole."""
        self._limit, self._stored, self._is_whole = samples, 0, False
        if not samples:
            return
        assert factors
        self._factors, self._names = factors, tuple(self.keys(samples, factors.world_size))
        self._own = tensor_over(factors.gradient(self._names[factors.rank]))
        self._all = [tensor_over(factors.parameters(name)) for name in self._names]

    def is_off(self, limit: int | None) -> bool:
        """Whether the latest step's samples are not those of the choice."""
        return self.samples < _SHRUNK * self.planned or (limit is not None and self.samples > limit)

    def end_step(self) -> None:
        # What is accumulated goes whole.
        self.samples = 0 if self._accumulates else self._count
        self._count, self._is_local, self._accumulates = 0, False, False

    # ---- The module.

    def _forward(self, inputs: torch.Tensor) -> torch.Tensor:
        weight, bias = self._module.weight, self._module.bias
        is_plain = (
            self._ways is None
            or weight is not self.weight  # it is pruned, or that of torch.func.functional_call
            or not torch.is_grad_enabled()
            or torch.is_autocast_enabled("cpu")
            or not (inputs.dtype == weight.dtype == torch.float32)
        )
        if is_plain:
            return functional.linear(inputs, weight, bias)
        if self._limit:
            result: torch.Tensor = Linear.apply(inputs, weight, bias, self)  # type: ignore[no-untyped-call]
            return result
        result = functional.linear(inputs, weight, bias)
        if result.requires_grad:
            samples = result.numel() // weight.shape[0]
            note = functools.partial(self._note_samples, samples)
            result.register_hook(note)  # type: ignore[no-untyped-call]
        return result

    def _note_samples(self, samples: int, _: torch.Tensor) -> None:
        if is_summed(self._node) and self._is_due():
            self._count += samples
            self._accumulates |= self._is_local and self.weight.grad is not None

    def _is_due(self) -> bool:
        """Whether this backward() is that of an exchange, which it begins."""
        if self._ways is None or not self._ways.is_due():
            self._is_local = True
            return False
        self._ways.clock.start()
        return True

    def _note_gradient(self, gradient: torch.Tensor | None) -> None:
        """The weight has one in this step, which is not in the factors."""
        if gradient is not None and self._ways and self._ways.is_due():
            self._is_whole = True

    def push(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
        """What Linear calls."""
        if not self._is_due():
            return left.t() @ right
        self._count += len(left)
        end = self._stored + len(left)
        # What is in the gradient already, of backward()s without an exchange, is this rank's alone.
        accumulated = self.weight.grad is not None and bool(self.weight.grad.any())
        self._accumulates |= accumulated
        if end > self._limit or accumulated:
            self._is_whole = True
            return left.t() @ right
        for side, part in zip(self._sides(self._own), (left, right), strict=True):
            side[self._stored : end].copy_(part.detach())
        self._stored = end
        return None

    def _sides(self, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, columns = self.weight.shape
        split, end = self._limit * rows, self._limit * (rows + columns)
        return factors[:split].view(-1, rows), factors[split:end].view(-1, columns)

    # ---- Its exchange: each of one thread, in this order.

    @torch.no_grad()
    def begin(self, gradient: torch.Tensor) -> None:
        """Pushes the factors. The gradient, contiguous, is lent until `finish`."""
        self._gradient = gradient
        if not self._stored and not self._is_whole:
            self._is_whole = bool(gradient.any())  # it is not used, and has an old one
        if self._is_whole and self._stored:
            left, right = (side[: self._stored] for side in self._sides(self._own))
            gradient += left.t() @ right
        self._own[-1] = _WHOLE if self._is_whole else self._stored
        for rank, name in enumerate(self._names):
            if rank == self._factors.rank:
                self._factors.push(name)
            else:
                self._factors.push_null(name)

    def answer(self) -> None:
        """Waits for the factors of all, and pushes what is not in them."""
        for name in self._names:
            self._factors.wait(name)
        counts = [factors[-1].item() for factors in self._all]
        for name, count in zip(self._names, counts, strict=True):
            if count != _WHOLE and count not in range(self._limit + 1):
                raise InvalidError(
                    f"key '{name}' has factors of {count} samples, and there is room for "
                    f"{self._limit}"
                )
        self._some_are_whole = _WHOLE in counts
        if self._some_are_whole:
            assert self._ways
            if self._is_whole:
                self._ways.worker.push(self.name)
            else:
                self._ways.worker.push_null(self.name)
        self._stored, self._is_whole = 0, False

    @torch.no_grad()
    def finish(self) -> None:
        """The gradient is that of all ranks."""
        assert self._ways
        total = self._gradient
        if self._some_are_whole:
            self._ways.worker.wait(self.name)
            total = torch.zeros_like(self._gradient)
        for factors in self._all:
            samples = int(factors[-1].item())
            if samples > 0:
                left, right = self._sides(factors)
                add_products(left, right, samples, total)
        total *= self._ways.share()
        if self._some_are_whole:
            self._gradient += total
