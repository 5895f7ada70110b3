"""What optimizers share that step one parameter after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class ByParameter(Optimizer):
    """An optimizer that says only how a parameter with a gradient is stepped."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; what the closure returned, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(group, parameter, parameter.grad, self.state[parameter])
        return loss

    def _step(
        self,
        group: dict[str, Any],
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
    ) -> None:
        raise NotImplementedError
