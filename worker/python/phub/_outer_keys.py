"""The keys of a DiLoCo: what of the model is exchanged, and where its base lies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from phub import _device
from phub._gathered import small_among
from phub._options import Key, Option
from phub._tensors import DTYPES, key_for, pull_into
from phub._views import tensor_over
from phub.errors import InvalidError
from phub.worker import Worker

_TOGETHER = 1 << 15  # elements of a key that has several parameters, at most


class OuterKey:
    """A parameter, or several small ones, that are exchanged as one key.

    The base is the job's value of the key: what the latest round made of it. The thread that trains
    makes all calls.
    """

    def __init__(self, name: str, members: Mapping[str, nn.Parameter]) -> None:
        self.name, self.members = name, members
        self.elements = sum(p.numel() for p in members.values())
        self.device = next(iter(members.values())).device
        self.fragment = 0  # as the job knows it
        self.under_way = False  # pushed, and its result is not taken
        self.base = torch.empty(0)  # flat: one parameter behind the other
        self._result = torch.empty(0)  # where the next base comes
        self._slot: torch.Tensor | None = None  # where the box reads; None: on a device

    def for_job(self) -> Key:
        """As the worker takes it."""
        if len(self.members) == 1:
            key = key_for(next(iter(self.members.values())))
            return replace(key, fragment=self.fragment)
        return Key(self.elements, fragment=self.fragment)

    def attach(self, worker: Worker) -> None:
        """After the worker's broadcast(), each time that it has joined, before exchange_on()."""
        self._worker, self.under_way = worker, False
        kind = DTYPES[worker.parameter_dtype]
        if _device.is_gpu(self.device):
            self._result = torch.empty(self.elements, dtype=kind, device=self.device)
            pull_into(worker, self.name, self._result, kind)
        else:
            self._result = tensor_over(worker.parameters(self.name), kind)[: self.elements]
            slot_kind = DTYPES[worker.gradient_dtype(self.name)]
            self._slot = tensor_over(worker.gradient(self.name), slot_kind)[: self.elements]
        self.base = self._result

    def detach(self) -> None:
        """Before the worker's memory becomes invalid."""
        self.base = self._result = torch.empty(0)
        self._slot, self.under_way = None, False

    # ---- The exchange.

    @torch.no_grad()
    def push(self) -> None:
        """Sends how far the parameters are from the base, which is invalid until take().

        What counts is the distance from the base as the parameter's type has it, so that one in 16
        bits that did not move sends zero.
        """
        if self._slot is None:
            self._slot_of_device = torch.empty(self.elements, device=self.base.device)
            self._measure(self._slot_of_device)
            assert self._worker.on_device
            self._worker.on_device.push(self.name, self._slot_of_device)
        else:
            self._measure(self._slot)
            self._worker.push(self.name)
        self.under_way = True

    def _measure(self, into: torch.Tensor) -> None:
        for place, (parameter, base) in zip(self._parts(into), self.bases(), strict=True):
            if parameter.dtype == base.dtype == place.dtype:
                torch.sub(base, parameter, out=place)
            else:
                place.copy_(base.to(parameter.dtype).float() - parameter.float())

    def take(self) -> None:
        """Waits for the result, which is the new base. On a GPU its stream waits."""
        if not self.under_way:
            return
        if self._worker.on_device:
            self._worker.on_device.pull(self.name, self._result)
            del self._slot_of_device
        else:
            self._worker.wait(self.name)
        self.base, self.under_way = self._result, False

    @torch.no_grad()
    def merge(self, alpha: float) -> None:
        """Moves the parameters to the base, all the way but for this part of it."""
        for parameter, base in self.bases():
            if alpha:
                parameter.copy_(parameter.float() * alpha + base.float() * (1 - alpha))
            else:
                parameter.copy_(base)

    @torch.no_grad()
    def pull_towards_base(self, strength: float, ids: set[int]) -> None:
        """Adds the gradient of strength / 2 * |parameter - base|^2 to those of these ids."""
        for parameter, base in self.bases():
            if id(parameter) in ids and parameter.grad is not None:
                parameter.grad.add_((parameter.detach() - base.to(parameter.dtype)) * strength)

    def values(self) -> torch.Tensor:
        """The parameters as they are: flat, float32, in memory of the host."""
        parts = [p.detach().float().cpu().flatten() for p in self.members.values()]
        return torch.cat(parts)

    def use_base(self, base: torch.Tensor) -> None:
        """Another base, flat, which the box has, too, for the next push."""
        self.base = base.to(self._result, copy=True)

    # ---- Its parameters.

    def bases(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Each parameter with its base, in the parameter's shape."""
        yield from zip(self.members.values(), self._parts(self.base), strict=True)

    def parts_of(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Of an array of the key, what each parameter has, by the parameters' names."""
        return dict(zip(self.members, self._parts(flat), strict=True))

    def joined(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The other way: a contiguous float32 array of the key. Raises InvalidError."""
        flat = torch.empty(self.elements)
        for name, place in self.parts_of(flat).items():
            given = parts.get(name)
            if given is None or given.shape != place.shape:
                found = "nothing" if given is None else f"shape {tuple(given.shape)}"
                raise InvalidError(
                    f"the state has {found} for parameter '{name}', whose shape is "
                    f"{tuple(place.shape)}: load a state of the same model"
                )
            place.copy_(given)
        return flat

    def _parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        shapes = [p.shape for p in self.members.values()]
        parts = torch.split(flat, [shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def keys_of(
    named: Mapping[str, nn.Parameter], formats: Mapping[str, str], given: Mapping[str, Option]
) -> list[OuterKey]:
    """In the model's order. Many small parameters are brought together, unless codes are coarse.

    formats, given: of the job.
    """
    small = small_among(named, formats, {"on_nonfinite": "pass", **given})
    bunches: list[dict[str, nn.Parameter]] = []
    has = _TOGETHER  # elements of the latest bunch
    for name, parameter in sorted(small.items()):  # ranks may have made modules in another order
        if has + parameter.numel() > _TOGETHER:
            bunches.append({})
            has = 0
        bunches[-1][name] = parameter
        has += parameter.numel()
    together = [OuterKey(f"small-parameters:{at}", bunch) for at, bunch in enumerate(bunches)]
    key_of = {name: key for key in together for name in key.members}
    keys = [key_of.get(name) or OuterKey(name, {name: p}) for name, p in named.items()]
    return list(dict.fromkeys(keys))


def fragments_of(
    keys: Sequence[OuterKey], count: int, *, may_differ: bool = False
) -> list[list[OuterKey]]:
    """Cuts them into so many fragments, of about as many elements each, in the model's order.

    may_differ: ranks may be at different fragments, so the job has to know them.
    Raises InvalidError if there are fewer keys.
    """
    if len(keys) < count:
        raise InvalidError(
            f"fragments={count}, and the model has {len(keys)} keys (a parameter each, or several "
            "small ones together): at most as many fragments"
        )
    fragments, at = [], 0
    for made in range(count):
        rest = keys[at:]
        target = sum(key.elements for key in rest) / (count - made)
        most = len(rest) - (count - made - 1)  # leaves a key for each of the others
        end, has = 1, rest[0].elements
        while end < most and (made == count - 1 or has + rest[end].elements / 2 <= target):
            has += rest[end].elements
            end += 1
        fragments.append([*rest[:end]])
        at += end
    for number, fragment in enumerate(fragments):
        for key in fragment:
            key.fragment = number if may_differ else 0
    return fragments
