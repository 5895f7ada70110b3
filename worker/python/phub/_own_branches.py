"""Branches of a training whose steps its ranks make: in a job without an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from phub._by_branch import ByBranch
from phub._own_state import OwnState, Stateful
from phub.errors import InvalidError
from phub.worker import Worker

_BETAS = {"beta1": 0, "beta2": 1}
_OF_RANKS = "batch"  # Worker.batch_in has it


class OwnBranches:
    """Keeps a model and PyTorch's optimizer of each branch, and gives them back when it runs.

    For `phub.ddp`, `DDPState`, `FSDPState`, and whatever makes its own steps of gradients that a
    job of optimizer "none" averages, with the option `branches`, and on_nonfinite "pass". All ranks
    do the same:

        ddp = phub.ddp(model, branches=3)
        own = phub.OwnBranches(ddp.phub.worker, model, optimizer)
        for batch in data:
            own.begin()  # before anything of the step
            optimizer.zero_grad()
            ...

    A child has what its parent had when it was forked: parameters (but frozen ones that are in no
    group) and buffers, the optimizer's state and groups, random numbers of the CPU, PowerSGD's
    state, and what is kept. The values that it was forked with go into all groups: lr, momentum,
    weight_decay and others by PyTorch's names, but beta1 and beta2 of betas. All of it is in
    memory, once for each branch but the one that runs.
    """

    def __init__(
        self,
        worker: Worker,
        model: nn.Module,
        optimizer: Optimizer,
        kept: Mapping[str, Stateful] | None = None,
    ) -> None:
        """kept: what else a branch has for itself, such as a data loader or a GradScaler.

        Tensors of its state come back on the CPU.
        """
        self._worker = worker
        self._own = _Whole(model, optimizer)
        self._own.keep({**worker.of_branches, **(kept or {})})
        self._by_branch = ByBranch(self._own.saved, self._own.load)

    def begin(self) -> int:
        """Before anything of a step, when the one before is over. Returns the branch that runs.

        Raises InvalidError: it was forked with a value that the optimizer's groups do not have.
        """
        self._worker.wait_all()
        branch = self._by_branch.begin(self._worker)
        if branch != self._own.branch:  # what is in place is what it was forked from
            self._own.set_values(branch, self._worker.branch_values(branch))
            self._own.branch = branch
        return branch


class _Whole(OwnState):
    """With the parameters, and the optimizer's state; of sharded ones this rank's part."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(model, optimizer)
        self.branch = 0  # whose state it is
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        known = {id(p) for p in self._parameters}
        self._parameters += [
            p for p in model.parameters() if p.requires_grad and id(p) not in known
        ]

    @torch.no_grad()
    def set_values(self, branch: int, values: Mapping[str, float]) -> None:
        """In all groups of the optimizer."""
        for group in self._optimizer.param_groups:
            for name, value in values.items():
                if name == _OF_RANKS:
                    continue
                if name in _BETAS and "betas" in group:
                    betas = list(group["betas"])
                    betas[_BETAS[name]] = value
                    group["betas"] = tuple(betas)
                elif isinstance(group.get(name), torch.Tensor):
                    group[name] = torch.full_like(group[name], value)
                elif name in group and isinstance(group[name], float | int):
                    group[name] = value
                else:
                    numbers = sorted(n for n, v in group.items() if isinstance(v, float))
                    raise InvalidError(
                        f"branch {branch} was forked with {name}={value:g}, and groups of "
                        f"{type(self._optimizer).__name__} have no such value, but "
                        f"{', '.join(numbers)}: tune these"
                    )

    def _more(self) -> dict[str, Any]:
        state = self._optimizer.state
        return super()._more() | {
            "branch": self.branch,
            "parameters": [_local(p).detach() for p in self._parameters],
            "state": [
                {name: _local(value) for name, value in state.get(p, {}).items()}
                for p in self._parameters
            ],
            "devices": [
                {
                    name: str(value.device)
                    for name, value in state.get(p, {}).items()
                    if isinstance(value, torch.Tensor)
                }
                for p in self._parameters
            ],
        }

    @torch.no_grad()
    def _take(self, state: Mapping[str, Any]) -> None:
        super()._take(state)
        self.branch = state["branch"]
        for p, value in zip(self._parameters, state["parameters"], strict=True):
            _local(p).copy_(value)
        saved = zip(self._parameters, state["state"], state["devices"], strict=True)
        for p, of_one, devices in saved:
            before = self._optimizer.state.pop(p, {})
            if of_one:
                self._optimizer.state[p] = {
                    name: _put(value, before.get(name), devices.get(name), p)
                    for name, value in of_one.items()
                }


def _local(value: Any) -> Any:
    """Of a DTensor this process's part."""
    return value.to_local() if hasattr(value, "to_local") else value


def _put(value: Any, before: Any, device: str | None, parameter: torch.Tensor) -> Any:
    """What `_local` made of a state of the parameter: in the tensor before, if that is alike."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(before, torch.Tensor):
        mine = _local(before)
        if (mine.shape, mine.dtype) == (value.shape, value.dtype) and str(mine.device) == device:
            mine.copy_(value)
            return before
    # Not sharded as the parameter is: such as a number of steps.
    if not hasattr(parameter, "to_local") or value.shape != _local(parameter).shape:
        return value.to(device)
    made = torch.zeros_like(parameter, dtype=value.dtype)
    _local(made).copy_(value)
    return made
