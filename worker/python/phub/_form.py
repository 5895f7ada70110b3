"""What a DistributedOptimizer is refused for before its rank joins."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from phub._model import is_sharded
from phub._options import Option, check_results
from phub.errors import InvalidError
from phub.trust import Lamb, Lars
from phub.whole import OF_TORCH, Adafactor, Muon

# Their steps need the whole of a parameter.
_BY_KEYS = (Lars, Lamb, Adafactor, Muon, *OF_TORCH)


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


def take_slack(delay: int, options: Mapping[str, Option]) -> tuple[int, dict[str, Option]]:
    """Returns the delay that consistency="ssp" with this slack asks for, and the other options.

    In lock-step a step that is late by d has all gradients up to d steps before it, of every rank:
    that is SSP's bound, and a round's result depends on no timing.
    Raises InvalidError for a slack that is no delay, or another one than `delay`.
    """
    slack = options.get("slack")
    if options.get("consistency") != "ssp" or slack is None:
        return delay, dict(options)
    if str(slack) not in ("0", "1") or (delay and str(slack) != str(delay)):
        raise InvalidError(
            f"consistency='ssp' with slack={slack!r} and delay={delay!r}: the slack is 0 or 1, "
            "which stands for delay=0 and delay=1. A key has one push under way, so that results "
            "are at most a step late"
        )
    rest = {name: value for name, value in options.items() if name not in ("consistency", "slack")}
    return int(slack), rest


def check_delay(
    delay: object,
    overlap: object,
    *,
    server: bool,
    zero_copy: bool,
    options: Mapping[str, Option],
) -> None:
    """Raises InvalidError for a delay that cannot be, or not with the others."""
    if delay not in (0, 1) or isinstance(delay, bool):
        raise InvalidError(
            f"delay={delay!r}: it is 0 or 1. A key has one push under way, so that results are at "
            "most a step late"
        )
    if not delay:
        return
    if not server:
        raise InvalidError(
            "delay is for steps of the box (server=True): with server=False every rank makes a "
            "step of its own, of the gradients of that step"
        )
    if overlap == "forward":
        raise InvalidError(
            'overlap="forward" waits in forward() for the parameters of the step before, and with '
            "delay=1 nothing does: leave overlap out"
        )
    if zero_copy:
        raise InvalidError(
            "delay=1 and zero_copy do not go together: results come while forward() and backward() "
            "still use the parameters of the step before"
        )
    if options.get("branches"):
        raise InvalidError(
            "delay=1 and branches do not go together: a step's results would come into the "
            "parameters of the branch that runs after it"
        )


def check_shards(
    model: nn.Module,
    options: Mapping[str, Option],
    *,
    server: bool,
    zero_copy: bool,
    factors: object,
    rows: object,
    max_norm: float,
    optimizer: Optimizer,
) -> None:
    """Refuses what does not go with parameters of fully_shard(), if the model has any."""
    if not is_sharded(model.parameters()):
        return
    if not server:
        raise InvalidError(
            "the model is sharded (fully_shard), and server=False is for whole parameters: use "
            "phub.FSDPState(model), and the optimizer as ever"
        )
    why = (
        "each process of a replica exchanges its shard in a job of its own, and none of these jobs "
        "sees the whole"
    )
    skips = options.get("on_nonfinite") == "skip"
    refused = {
        "zero_copy": (zero_copy, "shards lie in FSDP's memory. Leave it out"),
        "factors": (factors, "factors are of a whole weight. Leave them out"),
        "rows and lazy": (rows, "FSDP does not add up sparse gradients. Use sparse=False"),
        "max_norm": (max_norm, f"{why} norm. Use phub.FSDPState and clip_grad_norm_"),
        type(optimizer).__name__: (
            isinstance(optimizer, _BY_KEYS),
            f"{why} parameter. Use another optimizer",
        ),
        "on_nonfinite='skip'": (skips, f"{why} step. Say 'stop', 'pass' or 'exclude'"),
        "branches": (options.get("branches"), f"{why} model's branches. Leave them out"),
        "memory_device": (
            options.get("memory_device") is not None,
            "their keys lie in memory of the host, also if the shards are on a GPU. Leave it out",
        ),
    }
    for name, (given, reason) in refused.items():
        if given:
            raise InvalidError(f"{name} and a sharded model (fully_shard): {reason}")


def check_without_box(
    optimizer: Optimizer,
    factors: object,
    rows: object,
    max_norm: float,
    schedule: object,
) -> None:
    """Refuses what the box does in a step of its own, which server=False leaves to the worker."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidError(
            "a step of LBFGS has several backward(), in a closure that it calls itself: use "
            "phub.ddp(model), and LBFGS as ever"
        )
    if factors:
        raise InvalidError(
            "factors are for steps of the box (server=True); phub.ddp has factors for others"
        )
    if rows:
        raise InvalidError("rows and lazy are for steps of the box (server=True)")
    if schedule:
        raise InvalidError(
            "schedule is for steps of the box (server=True); torch's schedulers are for others"
        )
    if max_norm:
        raise InvalidError(
            "max_norm is for steps of the box (server=True). With server=False call "
            "clip_grad_norm_ between synchronize() and step()"
        )
