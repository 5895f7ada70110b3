"""LARS and LAMB, which torch.optim does not have: a trust ratio for each parameter."""

from __future__ import annotations

import math
from typing import Any

import torch

from phub._by_parameter import ByParameter
from phub.errors import InvalidError


class Lars(ByParameter):
    """SGD with momentum, and steps in proportion to the parameter's norm (You et al., 2017).

    g = (g + weight_decay * p) * ratio; buffer = momentum * buffer + g; p -= lr * buffer. The ratio
    is trust_coeff * |p| / (|g| + weight_decay * |p| + eps), and 1 for a parameter whose group has
    neither a weight_decay nor always_adapt: biases, for example. As timm.optim.Lars, with norms in
    double. With `phub.DistributedOptimizer` the box makes the steps. The state is one array of each
    parameter, `momentum_buffer`. Gradients are dense.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        eps: float = 1e-8,
        trust_coeff: float = 0.001,
        always_adapt: bool = False,
    ) -> None:
        """Raises InvalidError for a value that the box would refuse."""
        values = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "eps": eps,
            "trust_coeff": trust_coeff,
        }
        check_positive(values)
        super().__init__(params, {**values, "always_adapt": always_adapt})

    def _step(
        self,
        group: dict[str, Any],
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
    ) -> None:
        decay = group["weight_decay"]
        change = gradient.add(parameter, alpha=decay) if decay else gradient.clone()
        if decay or group["always_adapt"]:
            own, other = _norm(parameter), _norm(gradient)
            if own > 0 and other > 0:
                below = other + decay * own + group["eps"]
                change.mul_(group["trust_coeff"] * own / below)
        if "momentum_buffer" in state:
            change = state["momentum_buffer"].mul_(group["momentum"]).add_(change)
        state["momentum_buffer"] = change
        parameter.add_(change, alpha=-group["lr"])


class Lamb(ByParameter):
    """Adam, and steps in proportion to the parameter's norm (You et al., 2019, algorithm 2).

    u = Adam's update, with bias correction, + weight_decay * p; p -= lr * ratio * u. The ratio is
    |p| / |u|, and 1 for a parameter whose group has neither a weight_decay nor always_adapt: for
    example biases. As timm.optim.Lamb with max_grad_norm=None, with norms in double. With
    `phub.DistributedOptimizer` the box makes the steps. The state is two arrays of each parameter,
    `exp_avg` and `exp_avg_sq`, and `step`. Gradients are dense.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.01,
        *,
        eps: float = 1e-6,
        always_adapt: bool = False,
    ) -> None:
        """Raises InvalidError for a value that the box would refuse."""
        check_positive({"lr": lr, "eps": eps, "weight_decay": weight_decay})
        if not all(0 <= beta < 1 for beta in betas):
            raise InvalidError(f"betas are {betas}: they are from 0 to below 1")
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "always_adapt": always_adapt,
            },
        )

    def _step(
        self,
        group: dict[str, Any],
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
    ) -> None:
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        steps = state["step"].item()
        beta1, beta2 = group["betas"]
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = square.sqrt().div_((1 - beta2**steps) ** 0.5).add_(group["eps"])
        update = mean.div(1 - beta1**steps).div_(root)
        decay = group["weight_decay"]
        if decay:
            update.add_(parameter, alpha=decay)
        if decay or group["always_adapt"]:
            own, other = _norm(parameter), _norm(update)
            if own > 0 and other > 0:
                update.mul_(own / other)
        parameter.add_(update, alpha=-group["lr"])


def check_positive(values: dict[str, float]) -> None:
    """Raises InvalidError for a value below 0, or that is not finite."""
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise InvalidError(f"{name} is {value}: it is at least 0, and finite")


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64).item())
