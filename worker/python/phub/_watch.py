"""Notices that a model is trained, and what exchanges its gradients is never called."""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from phub.errors import InvalidError


class Watch:
    """Looks at every backward() until the first exchange, and costs nothing afterwards.

    The sign is a step between two backward(): it used a gradient that was not exchanged. Several
    backward() without a step are an accumulation. Parameters and model are not kept alive. Without
    close() a line on stderr says it, when this is freed or the program ends.
    """

    def __init__(
        self, job: str, parameters: Mapping[str, torch.Tensor], what: str, remedy: str
    ) -> None:
        """what: exchanges gradients. remedy: what to do so that it is called."""
        self.is_local: Callable[[], bool] = lambda: False  # steps now are this rank's own (no_sync)
        self._job, self._what, self._remedy = job, what, remedy
        self._steps = 0  # of optimizers that have these parameters
        self._seen: dict[str, tuple[int, int]] = {}  # steps and version, at the latest backward()
        self._trained: set[str] = set()  # with "backward()" or "step()", and no exchange
        weakref.finalize(self, _say, self._trained, job, what, remedy, os.getpid())
        self._ids = {id(p) for p in parameters.values()}
        count = weakref.WeakMethod(self._count_step)
        self._hooks = [
            p.register_post_accumulate_grad_hook(functools.partial(self._look, name))  # type: ignore[no-untyped-call]
            for name, p in parameters.items()
        ]
        # Versions do not tell of fused optimizers, and optimizers not of steps by hand.
        self._hooks.append(register_optimizer_step_post_hook(functools.partial(_call, count)))
        weakref.finalize(self, self._hooks[-1].remove)

    def end(self) -> None:
        """There was an exchange, or the job is left."""
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()
        self._trained.clear()

    def close(self) -> None:
        """Raises InvalidError if there was a backward() or a step, and no exchange."""
        message = _message(self._trained, self._job, self._what, self._remedy)
        self.end()
        if message and sys.exc_info()[0] is None:  # or that would hide what has happened
            raise InvalidError(message)

    def _count_step(self, optimizer: Optimizer) -> None:
        groups = optimizer.param_groups
        if any(id(p) in self._ids for group in groups for p in group["params"]):
            self._steps += 1
            self._trained.add("step()")

    def _look(self, name: str, parameter: torch.Tensor) -> None:
        self._trained.add("backward()")
        if self.is_local():
            return
        now = self._steps, parameter._version
        if self._seen.setdefault(name, now) != now:
            self.end()
            raise InvalidError(
                f"job '{self._job}': parameter '{name}' was changed by a step, and its gradient "
                f"was not exchanged: {self._what} was not called. {self._remedy}"
            )


def _call(method: weakref.WeakMethod[Any], optimizer: Optimizer, *_: object) -> None:
    if (count := method()) is not None:
        count(optimizer)


def _message(trained: set[str], job: str, what: str, remedy: str) -> str:
    """What to say; an empty text if there was an exchange, or nothing was trained."""
    if not trained:
        return ""
    return (
        f"job '{job}' ends and has exchanged no gradient, but there was a {min(trained)}: {what} "
        f"was never called. {remedy}. If all backward() were in no_sync(), leave the last one of "
        "each step outside; torch.autograd.grad calls no hook, use backward()"
    )


def _say(trained: set[str], job: str, what: str, remedy: str, process: int) -> None:
    message = _message(trained, job, what, remedy)
    if message and process == os.getpid() and getattr(sys, "last_value", None) is None:
        print(f"phub: {message}", file=sys.stderr, flush=True)
