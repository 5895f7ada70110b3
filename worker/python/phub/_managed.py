"""An optimizer and a DDP around a Manager, as torchft has them."""

# No `from __future__ import annotations`: DDP compares the hook's annotations with classes.

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn import parallel

from phub._alone import Group
from phub.errors import InvalidError
from phub.pytorch import _SYNC_BUFFERS

if TYPE_CHECKING:
    from phub.manager import Manager, Work


class Optimizer(torch.optim.Optimizer):
    """Any optimizer of the program: zero_grad() begins a step, and step() ends it.

    step() changes nothing where the step does not count (`Manager.should_commit`).
    """

    def __init__(self, manager: "Manager", optim: torch.optim.Optimizer) -> None:
        self.manager, self.optim = manager, optim

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002
        """Begins the step."""
        self.manager.start_quorum()
        self.optim.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Ends it."""
        if closure is not None:
            raise InvalidError(
                "phub.manager.Optimizer: step() with a closure would compute several gradients in "
                "a step: call it without"
            )
        if self.manager.should_commit():
            self.optim.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """To the program's optimizer."""
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The program's optimizer's."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The same."""
        self.optim.load_state_dict(dict(state_dict))

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The program's optimizer's."""
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The same."""
        return self.optim.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The same."""
        return self.optim.defaults


class DistributedDataParallel(parallel.DistributedDataParallel):
    """DDP whose gradients the manager averages, while backward() goes on.

    All ranks' parameters are those that the manager's `register_state_dict_fn` gives, and not
    DDP's own broadcast; buffers are each rank's own.
    """

    def __init__(self, manager: "Manager", module: nn.Module, **arguments: Any) -> None:
        for name in ("find_unused_parameters", "init_sync", _SYNC_BUFFERS):
            if name in arguments:
                raise InvalidError(f"phub.manager's DistributedDataParallel has no {name}")
        given = {
            "gradient_as_bucket_view": True,
            **arguments,
            # Else it makes its buckets anew after the first step, and a newcomer's would differ.
            "find_unused_parameters": True,
            "init_sync": False,
            _SYNC_BUFFERS: False,
        }
        super().__init__(module, process_group=Group(), **given)
        self.register_comm_hook(_Hook(manager), _exchange)


class _Hook:
    """Of one DDP: the buckets of this backward() that are under way."""

    def __init__(self, manager: "Manager") -> None:
        self.manager = manager
        self.under_way: list[tuple[Work, torch.Tensor, Future[torch.Tensor]]] = []


def _exchange(hook: _Hook, bucket: GradBucket) -> Future[torch.Tensor]:
    if bucket.index() == 0:
        hook.under_way = []
    future: Future[torch.Tensor] = Future()
    hook.under_way.append((hook.manager.allreduce(bucket.buffer()), bucket.buffer(), future))
    if bucket.is_last():
        for work, buffer, each in hook.under_way:
            work.wait()
            each.set_result(buffer)
        hook.under_way = []
    return future


def allreduce_gradients(manager: "Manager", model: nn.Module) -> None:
    """For a model without DDP: averages its gradients, after backward() and before the step.

    A parameter without a gradient has one of zero then: another rank may have one.
    """
    works: list[Optional[Any]] = []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        works.append(manager.allreduce(parameter.grad))
    for work in works:
        if work:
            work.wait()
