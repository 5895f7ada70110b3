"""What of a model a DistributedOptimizer exchanges: its parameters, as keys of the job."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from phub import _device
from phub._box_factors import BoxFactors, Layers, layers_in
from phub._box_ways import EitherWay, Weights, choosable
from phub._exchanged import Exchanged
from phub._names import by_name, plain_name
from phub._options import MAX_DIMENSIONS, Key, Option
from phub._rows import SparseRows, rows_in
from phub._tensors import DTYPES, format_of_job
from phub._ways import AUTO
from phub.errors import InvalidError
from phub.worker import Worker

if TYPE_CHECKING:
    from phub._sharded import Unit

Groups = Sequence[Mapping[str, Any]]


def named_parameters(model: nn.Module, groups: Groups) -> dict[str, nn.Parameter]:
    """Those of the groups, in the model's order. Raises InvalidError if one is not the model's."""
    wanted = {id(p) for group in groups for p in group["params"]}
    named = {plain_name(name): p for name, p in model.named_parameters() if id(p) in wanted}
    foreign = wanted - {id(p) for p in named.values()}
    for number, group in enumerate(groups):
        for p in group["params"]:
            if id(p) in foreign:
                raise InvalidError(
                    f"group {number} of the optimizer has a parameter of shape "
                    f"{tuple(p.shape)} that is not the model's: give the model whose "
                    "parameters() the optimizer was made of"
                )
    return named


class Present:
    """The parameters that a model has when the job is made, and where."""

    def __init__(self, model: nn.Module, what: str = "DistributedOptimizer") -> None:
        """what: trains them."""
        self._what = what
        self._found = {plain_name(n): weakref.ref(p) for n, p in model.named_parameters()}

    def check(self, model: nn.Module) -> None:
        """Raises RuntimeError for one that came later, which nobody would train."""
        for name, parameter in model.named_parameters():
            known = self._found.get(plain_name(name))
            if parameter.requires_grad and (known is None or known() is not parameter):
                raise RuntimeError(
                    f"parameter '{plain_name(name)}' came into the model, or another took its "
                    f"place, after the {self._what} was made, which does not train it: change the "
                    f"model before its optimizer and the {self._what} are made"
                )


class Keys:
    """The parameters that are exchanged, as keys of the job, and how each is sent.

    The constructor of a DistributedOptimizer makes it before its rank joins.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Groups,
        options: Mapping[str, Option],
        *,
        factors: Mapping[str, int] | str,
        formats: Mapping[str, str],
        rows: Mapping[str, int],
        lazy: Sequence[str] | str | None,
        server: bool,
        first_goes_first: bool,
    ) -> None:
        """Arguments as those of DistributedOptimizer; first_goes_first: see _keys_of.

        lazy: None: all, and none has a dense gradient (torch.optim.SparseAdam).
        """
        found = named_parameters(model, groups)
        self.named = {name: p for name, p in found.items() if p.requires_grad and p.numel()}
        self.frozen = {name: p for name, p in found.items() if not p.requires_grad}
        for parameter in self.named.values():
            _device.check_memory(parameter.device, options.get("memory_device"))
        self.units: Mapping[str, Unit] = {}
        shapes = {name: tuple(p.shape) for name, p in self.named.items()}
        if is_sharded(self.named.values()):
            from phub import _sharded  # which imports what takes a second

            self.units = _sharded.units_of(model, self.named)
            shapes = {name: _sharded.shape_of_key(p) for name, p in self.named.items()}
        self.keys = _keys_of(
            self.named, shapes, groups, has_groups=server, first_goes_first=first_goes_first
        )
        self.layers: Layers = {}
        self.weights: Weights = {}  # that may go as factors
        if isinstance(factors, str) and factors == AUTO:
            self.weights = choosable(model, self.keys, options, formats)
        else:
            self.layers = layers_in(model, factors, self.keys, options)  # type: ignore[arg-type]
        self._tables = rows_in(model, rows, lazy, self.named, self.keys) if server else set()
        if self.units and self._tables:
            raise InvalidError(
                f"'{min(self._tables)}' has sparse gradients, which FSDP does not add up: use "
                "sparse=False"
            )

    def check_joined(self, worker: Worker) -> None:
        """Compares what the processes of a replica have joined. Raises InvalidError."""
        if self.units:
            from phub import _sharded

            _sharded.check_jobs(next(iter(self.named.values())), worker)

    def formats(self) -> dict[str, Option]:
        """The job's, for parameters in these formats."""
        kind = format_of_job(self.named)
        return {"gradient_dtype": kind, "parameter_dtype": kind}

    def exchanged(
        self, worker: Worker, *, is_mean: bool, zero_copy: bool, delay: bool
    ) -> list[Exchanged]:
        """Each parameter, on its way to the box and back."""
        form = is_mean, zero_copy, delay
        if self.units:
            from phub._sharded import Sharded

            return [
                Sharded(worker, name, tensor, *form, unit=self.units[name])
                for name, tensor in self.named.items()
            ]
        return [
            BoxFactors(worker, name, tensor, *form, samples=self.layers[name][1])
            if name in self.layers
            else self._kind_of(name)(worker, name, tensor, *form)
            for name, tensor in self.named.items()
        ]

    def _kind_of(self, name: str) -> type[Exchanged]:
        if name in self.weights:
            return EitherWay
        return SparseRows if name in self._tables else Exchanged


def is_sharded(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether FSDP has any of these."""
    return any(hasattr(p, "device_mesh") for p in parameters)


def _keys_of(
    named: Mapping[str, nn.Parameter],
    shapes: Mapping[str, tuple[int, ...]],
    groups: Groups,
    *,
    has_groups: bool,
    first_goes_first: bool,
) -> dict[str, int | Key]:
    """A key per parameter, with the shape of what a rank exchanges of it.

    has_groups: the box has hyperparameters of each group.
    first_goes_first: the first layers' results are needed first.
    """
    group_of = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
    keys: dict[str, int | Key] = {
        name: Key(
            math.prod(shapes[name]),
            priority=len(named) - number if first_goes_first else 0,
            shape=shapes[name] if p.dim() <= MAX_DIMENSIONS else (),
            group=group_of[id(p)] if has_groups else 0,
        )
        for number, (name, p) in enumerate(named.items())
    }
    return by_name(keys)


def check_format(named: Mapping[str, nn.Parameter], job_format: str) -> None:
    """For zero_copy: raises InvalidError if a parameter is not in the job's format, on the CPU."""
    for name, p in named.items():
        if _device.is_gpu(p.device):
            raise InvalidError(
                f"zero_copy is for parameters on the CPU, and '{name}' is on {p.device}"
            )
        if p.dtype != DTYPES[job_format]:
            raise InvalidError(
                f"zero_copy: parameter '{name}' is {p.dtype}, and the job's results are "
                f"{DTYPES[job_format]}: they must be the same"
            )
