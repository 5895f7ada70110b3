"""What a DiLoCo is refused for before its rank joins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from phub import _device
from phub._model import is_sharded, named_parameters
from phub._numbers import real_number
from phub._options import Option, check_results
from phub._outer_course import Course
from phub._same import Same
from phub._tensors import format_of_job
from phub.errors import InvalidError
from phub.optimizer import DistributedOptimizer
from phub.worker import Worker

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_PLAIN = ("f32", "bf16", "f16")


def inner_optimizers(given: object) -> tuple[Optimizer, ...]:
    """One, or several. Raises InvalidError for others."""
    found = tuple(given) if isinstance(given, Sequence) else (given,)
    for each in found:
        if not isinstance(each, Optimizer) or isinstance(each, DistributedOptimizer):
            raise InvalidError(
                f"the inner optimizer is a {type(each).__name__}: give DiLoCo an optimizer of "
                "PyTorch, which makes this rank's own steps, or several of them"
            )
    if not found:
        raise InvalidError("there is no inner optimizer: give DiLoCo at least one")
    return found


def hyper_of(
    lr: object, momentum: object, *, nesterov: bool, schedule: Mapping[str, float]
) -> tuple[str, dict[str, float]]:
    """The box's name of the outer optimizer, and its hyperparameters. Raises InvalidError."""
    rate, kept = real_number("lr", lr), real_number("momentum", momentum)
    if not 0 <= kept < 1:
        raise InvalidError(f"momentum={momentum!r}: it is a number from 0 to below 1")
    if not kept:
        return "sgd", {"lr": rate, **schedule}
    return "nesterov" if nesterov else "momentum", {"lr": rate, "momentum": kept, **schedule}


def check_options(rule: str, fragments: int, delta: object, options: Mapping[str, Option]) -> None:
    """Raises InvalidError for options with which a round would not be that of a DiLoCo."""
    if not isinstance(delta, str):
        raise InvalidError(f"delta={delta!r}: it is the name of a format, such as 'f32' or 'int4'")
    if "gradient_dtype" in options:
        raise InvalidError(
            f"gradient_dtype={options['gradient_dtype']!r}: what a DiLoCo pushes is no gradient; "
            "its format is delta, such as delta='int8'"
        )
    check_results(
        "DiLoCo",
        options,
        gradients=False,
        optimizer=rule,
        reduction="mean",
        initial="broadcast",
        branches="0",
    )
    if fragments == 1:
        return
    if options.get("on_nonfinite") == "skip":
        raise InvalidError(
            f"fragments={fragments} and on_nonfinite='skip': no key has a result before all were "
            "pushed, and fragments are sent at different steps. Use fragments=1, or 'stop', "
            "'exclude' or 'pass'"
        )


def check_counted(
    until: int, course: Course, options: Mapping[str, Option], *, is_alone: bool
) -> None:
    """Raises InvalidError if the box cannot save what ranks have between steps."""
    if has_quorum(options):
        raise InvalidError(
            "steps(): the ranks of a job with a quorum are at different rounds. Train while "
            "worker.round(key) is below the last round, and close()"
        )
    check_alone("steps()", is_alone=is_alone)
    if course.fragments > 1 and until % course.every:
        raise InvalidError(
            f"steps({until}) with fragments={course.fragments}: within a cycle some fragments are "
            f"a round ahead. Count up to a multiple of sync_every={course.every}"
        )


def check_alone(what: str, *, is_alone: bool) -> None:
    """Raises InvalidError for a process of an island."""
    if not is_alone:
        raise InvalidError(
            f"{what} and process_group: the box knows one process of an island, which has several. "
            "Save state_dict() of each to files of your own, and start all processes again"
        )


def check_buffers(buffers: Sequence[torch.Tensor]) -> None:
    """Raises InvalidError, in all processes of an island, if there are none to be made the same."""
    if not buffers:
        raise InvalidError("sync_buffers(): the model has no buffers with elements")


def has_quorum(options: Mapping[str, Option]) -> bool:
    """Whether the rounds of the job go on without late ranks."""
    return str(options.get("quorum", 0)) != "0"


def check_without_quorum(what: str, options: Mapping[str, Option]) -> None:
    """Raises InvalidError for a job whose ranks are at different rounds."""
    if has_quorum(options):
        raise InvalidError(
            f"{what} and a quorum: ranks are at different rounds, and one may be complete without "
            "rank 0. Save base(), and load the model before DiLoCo is made"
        )


def check_loaded(results: str, options: Mapping[str, Option]) -> None:
    """Raises InvalidError if the job takes no state."""
    check_without_quorum("load_state_dict()", options)
    if results not in _PLAIN:
        raise InvalidError(
            f"load_state_dict() with parameter_dtype={results!r}: results are differences to what "
            "a rank has, and the base of a state is something else. Use f32, bf16 or f16"
        )


def unwrapped(model: nn.Module, group: ProcessGroup | None) -> nn.Module:
    """The module that DDP has, whose names are those of a replica without DDP.

    Raises InvalidError for a DDP of several processes without their group.
    """
    if not isinstance(model, DistributedDataParallel):
        return model
    processes = distributed.get_world_size(model.process_group)
    if processes > 1 and group is None:
        raise InvalidError(
            f"the model is a DDP of {processes} processes, which train one replica: give DiLoCo "
            "their process_group, whose first process exchanges for all"
        )
    module: nn.Module = model.module
    return module


def exchanged_in(
    model: nn.Module, inner: Sequence[Optimizer], options: Mapping[str, Option]
) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """The parameters that are exchanged, and those of the optimizers that are frozen, by names.

    Raises InvalidError for parameters that cannot be exchanged.
    """
    found = named_parameters(model, [group for each in inner for group in each.param_groups])
    if is_sharded(found.values()):
        raise InvalidError(
            "the model is sharded (fully_shard), and a DiLoCo exchanges whole parameters: use DDP "
            "within an island, with process_group; or phub.FSDPState, which exchanges every step"
        )
    named = {name: p for name, p in found.items() if p.requires_grad and p.numel()}
    format_of_job(named)
    for parameter in named.values():
        _device.check_memory(parameter.device, options.get("memory_device"))
    return named, {name: p for name, p in found.items() if not p.requires_grad}


def compare_the_rest(model: nn.Module, worker: Worker, options: Mapping[str, Option]) -> None:
    """Frozen parameters and buffers, which nobody exchanges: ranks say what differs."""
    if worker.world_size > 1:
        same = Same(model, worker, options)
        same.compare_what_is_not_exchanged()
        same.close()


def check_unchanged(named: Mapping[str, torch.Tensor], frozen: Mapping[str, torch.Tensor]) -> None:
    """Raises RuntimeError if other parameters are trained than there are keys for."""
    for name, parameter in (*named.items(), *frozen.items()):
        if parameter.requires_grad != (name in named):
            now = "requires a gradient" if parameter.requires_grad else "was frozen"
            raise RuntimeError(
                f"parameter '{name}' {now} since DiLoCo was made, whose keys cannot change: freeze "
                "or unfreeze it before, or make a new DiLoCo, with another job's name"
            )
