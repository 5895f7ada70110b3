"""What of a model a DistributedOptimizer exchanges: its parameters, as keys of the job."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from phub import _device
from phub._box_factors import BoxFactors, layers_in
from phub._exchanged import Exchanged
from phub._names import by_name, plain_name
from phub._options import MAX_DIMENSIONS, Key, Option
from phub._rows import SparseRows, rows_in
from phub._tensors import DTYPES, format_of_job
from phub.errors import InvalidError
from phub.worker import Worker

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

    def __init__(self, model: nn.Module) -> None:
        self._found = {plain_name(n): weakref.ref(p) for n, p in model.named_parameters()}

    def check(self, model: nn.Module) -> None:
        """Raises RuntimeError for one that came later, which nobody would train."""
        for name, parameter in model.named_parameters():
            known = self._found.get(plain_name(name))
            if parameter.requires_grad and (known is None or known() is not parameter):
                raise RuntimeError(
                    f"parameter '{plain_name(name)}' came into the model, or another took its "
                    "place, after the DistributedOptimizer was made, which does not train it: "
                    "change the model before its optimizer and the DistributedOptimizer are made"
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
        factors: Mapping[str, int],
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
        self.keys = _keys_of(
            self.named, groups, has_groups=server, first_goes_first=first_goes_first
        )
        self.layers = layers_in(model, factors, self.keys, options)
        self._tables = rows_in(model, rows, lazy, self.named, self.keys) if server else set()

    def formats(self) -> dict[str, Option]:
        """The job's, for parameters in these formats."""
        kind = format_of_job(self.named)
        return {"gradient_dtype": kind, "parameter_dtype": kind}

    def exchanged(
        self, worker: Worker, *, is_mean: bool, zero_copy: bool, delay: bool
    ) -> list[Exchanged]:
        """Each parameter, on its way to the box and back."""
        form = is_mean, zero_copy, delay
        return [
            BoxFactors(worker, name, tensor, *form, samples=self.layers[name][1])
            if name in self.layers
            else (SparseRows if name in self._tables else Exchanged)(worker, name, tensor, *form)
            for name, tensor in self.named.items()
        ]


def _keys_of(
    named: Mapping[str, nn.Parameter], groups: Groups, *, has_groups: bool, first_goes_first: bool
) -> dict[str, int | Key]:
    """A key per parameter, with its shape.

    has_groups: the box has hyperparameters of each group.
    first_goes_first: the first layers' results are needed first.
    """
    group_of = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
    keys: dict[str, int | Key] = {
        name: Key(
            p.numel(),
            priority=len(named) - number if first_goes_first else 0,
            shape=tuple(p.shape) if p.dim() <= MAX_DIMENSIONS else (),
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
