"""What of a model a DistributedOptimizer exchanges: its parameters, as keys of the job."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from phub import _device
from phub._names import by_name, plain_name
from phub._options import MAX_DIMENSIONS, Key, Option, check_results
from phub._tensors import DTYPES, format_of_job
from phub.errors import InvalidError

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


def keys_of(
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


def formats_of(named: Mapping[str, nn.Parameter]) -> dict[str, Option]:
    """The job's, for parameters in these formats."""
    kind = format_of_job(named)
    return {"gradient_dtype": kind, "parameter_dtype": kind}


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


def check_form(
    overlap: object, accumulate: int, server: bool, zero_copy: bool, options: Mapping[str, Option]
) -> None:
    """Raises InvalidError if a DistributedOptimizer cannot be of this form."""
    if not isinstance(server, bool):
        raise InvalidError(
            f"server={server!r}: it is True or False. The box's address is box='HOST:PORT'"
        )
    if overlap not in ("backward", "forward", False) or accumulate < 1:
        raise InvalidError(
            f"overlap={overlap!r}, accumulate={accumulate}: overlap is 'backward', 'forward' "
            "or False, and accumulate at least 1"
        )
    form = "DistributedOptimizer" if server else "DistributedOptimizer(server=False)"
    check_results(form, options, gradients=not server)
    if overlap == "forward" and not server:
        raise InvalidError('overlap="forward" is for steps of the box (server=True)')
    if zero_copy and not server:
        raise InvalidError("zero_copy is for steps of the box (server=True)")
