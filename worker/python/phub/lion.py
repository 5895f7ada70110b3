"""The optimizer Lion, which torch.optim does not have."""

from __future__ import annotations

from typing import Any

import torch

from phub._by_parameter import ByParameter
from phub.errors import InvalidError


class Lion(ByParameter):
    """Steps of one size, in the direction of the sign of a mean (Chen et al., 2023, algorithm 2).

    With `phub.DistributedOptimizer` the box makes them, to the same bits. The state is one array
    of each parameter, `exp_avg`. Gradients are dense.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        """Raises InvalidError for a value that the box would refuse.

        lr: a third to a tenth of AdamW's.
        betas: of the mean whose sign is taken, and of the mean that is kept; 0 to below 1.
        weight_decay: lr times this is taken off each parameter in a step; three to ten times
            AdamW's.
        """
        if not (lr >= 0 and weight_decay >= 0 and all(0 <= beta < 1 for beta in betas)):
            raise InvalidError(
                f"lr is {lr}, betas are {betas} and weight_decay is {weight_decay}: lr and "
                "weight_decay are at least 0, betas are from 0 to below 1"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _step(
        self,
        group: dict[str, Any],
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
    ) -> None:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter)
        mean = state["exp_avg"]
        parameter.mul_(1 - lr * group["weight_decay"])
        direction = mean.mul(beta1).add_(gradient, alpha=1 - beta1).sign_()
        parameter.add_(direction, alpha=-lr)
        mean.mul_(beta2).add_(gradient, alpha=1 - beta2)
