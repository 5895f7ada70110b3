"""Small parameters of a model, whose gradients are exchanged together, as few keys.

A key has messages of its own, however small it is: thousands of them take seconds. Values are
brought together element by element, so where they lie changes no bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from phub import _device
from phub._options import Key, Option

_MANY = 256  # fewer cost a step less than tens of milliseconds
SMALL = 1024  # elements of a parameter at most
# Of each key, whatever is in it: ranks whose parameters differ have the same keys, and are told by
# `names` which parameter it is.
_ELEMENTS = 1 << 15
_PLAIN = ("f32", "bf16", "f16")


class Together:
    """Parameters whose gradients are one key."""

    def __init__(self, key: str, dtype: torch.dtype) -> None:
        self.key = key
        self.memory = torch.zeros(_ELEMENTS, dtype=dtype)
        self.places: dict[str, torch.Tensor] = {}  # by parameter: views of the memory
        self._used = 0
        self._lent: dict[str, torch.Tensor] = {}  # gradients of this step that are in the memory

    def add(self, name: str, parameter: torch.Tensor) -> bool:
        """False: there is no room for it."""
        end = self._used + parameter.numel()
        if end > _ELEMENTS:
            return False
        self.places[name] = self.memory[self._used : end].view(parameter.shape)
        self._used = end
        return True

    def begin_step(self) -> None:
        self._lent.clear()

    def lend(self, name: str, gradient: torch.Tensor) -> bool:
        """Notes where the result goes. Whether the gradients of all its parameters are here now."""
        self._lent[name] = gradient
        return len(self._lent) == len(self.places)

    @torch.no_grad()
    def finish(self) -> None:
        """Gives all gradients their results, which are in the memory."""
        places = [self.places[name] for name in self._lent]
        torch._foreach_copy_(list(self._lent.values()), places)
        self._lent.clear()


class Gathered:
    """Which parameters are exchanged together. The same on all ranks whose models are the same."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.groups: list[Together] = []
        self._group_of: dict[str, Together] = {}
        last: dict[torch.dtype, Together] = {}
        # By name, as ranks may have made their modules in another order; about that of backward().
        for name, parameter in sorted(parameters.items(), reverse=True):
            group = last.get(parameter.dtype)
            if group is None or not group.add(name, parameter):
                group = Together(f"small-parameters:{len(self.groups)}", parameter.dtype)
                group.add(name, parameter)
                self.groups.append(group)
                last[parameter.dtype] = group
            self._group_of[name] = group

    def __contains__(self, name: str) -> bool:
        return name in self._group_of

    @property
    def keys(self) -> dict[str, Key]:
        """Of the job, in place of the parameters."""
        return {group.key: Key(_ELEMENTS) for group in self.groups}

    def places(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each parameter's part of its group's memory, in the parameter's shape."""
        for name, group in self._group_of.items():
            yield name, group.places[name]

    def begin_step(self) -> None:
        """Forgets what is left of a backward() that did not end."""
        for group in self.groups:
            group.begin_step()

    @torch.no_grad()
    def put(self, gradients: Sequence[tuple[str, torch.Tensor]]) -> list[Together]:
        """Copies them into their groups. Returns those of which all are here now, to be pushed."""
        places = [self._group_of[name].places[name] for name, _ in gradients]
        torch._foreach_copy_(places, [gradient for _, gradient in gradients])
        return [
            group
            for name, gradient in gradients
            if (group := self._group_of[name]).lend(name, gradient)
        ]


def gathered_of(
    parameters: Mapping[str, nn.Parameter],
    formats: Mapping[str, str],
    given: Mapping[str, Option],
) -> Gathered | None:
    """None: each parameter is a key of its own, as there are few small ones, or it may matter.

    formats, given: of the job. Codes of few bits have scales of their own for each key, and what
    looks for values that are not finite names the key.
    """
    small = small_among(parameters, formats, given)
    return Gathered(small) if small else None


def small_among(
    parameters: Mapping[str, nn.Parameter],
    formats: Mapping[str, str],
    given: Mapping[str, Option],
) -> dict[str, nn.Parameter]:
    """Those that are to be exchanged together; none if they are few, or it may matter."""
    plain = given["gradient_dtype"] in _PLAIN and given["parameter_dtype"] in _PLAIN
    if not plain or given["on_nonfinite"] != "pass":
        return {}
    small = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.numel() <= SMALL
        and not _device.is_gpu(parameter.device)
        and not any(fnmatchcase(name, pattern) for pattern in formats)
    }
    return small if len(small) >= _MANY else {}
