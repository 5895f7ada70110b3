"""Adafactor and Muon, whose steps need the whole gradient of a parameter, as the box makes them."""

from __future__ import annotations

import math
from typing import Any

import torch

from phub._by_parameter import ByParameter
from phub.errors import InvalidError
from phub.trust import check_positive

EPS = torch.finfo(torch.float32).eps
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# PyTorch's own. An older one has none, or not both.
OF_TORCH = tuple(
    kind for name in ("Adafactor", "Muon") if (kind := getattr(torch.optim, name, None)) is not None
)
ADJUSTS = (None, "original", "match_rms_adamw")


def is_factored(shape: torch.Size) -> bool:
    """Whether Adafactor keeps means of rows and columns: of the last two dimensions, if any is."""
    return len(shape) > 1 and shape[-1] > 1 and shape[-2] > 1


class _Whole(ByParameter):
    """What both have: checked groups."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises InvalidError for a value that the box would refuse."""
        self._check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def _check(self, group: dict[str, Any]) -> None:
        raise NotImplementedError


class Adafactor(_Whole):
    """Second moments by rows and columns (Shazeer and Stern, 2018, algorithms 4 and 5).

    As torch.optim.Adafactor with foreach=False, with means and norms in double; a parameter with a
    side of 1 is not factored. With `phub.DistributedOptimizer` the box makes the steps. The state
    is `row_var` and `col_var` of a matrix, `variance` of another parameter, and `step`; in float32,
    or float64 if the parameter is. Gradients are dense.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        *,
        d: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        """Raises InvalidError for a value that the box would refuse.

        beta2_decay: a step t takes over t ** beta2_decay of the new squares; at most 0.
        eps: the least square root of a mean square, None: 2 ** -23; the least size of a parameter
            that the rate goes by. The first is above 0.
        d: an update's root mean square is clipped to it; at least 1.
        """
        super().__init__(
            params,
            {
                "lr": lr,
                "beta2_decay": beta2_decay,
                "eps": eps,
                "d": d,
                "weight_decay": weight_decay,
            },
        )

    def _check(self, group: dict[str, Any]) -> None:
        least, size = group["eps"]
        _check_eps(EPS if least is None else least)
        check_positive({"lr": group["lr"], "weight_decay": group["weight_decay"], "eps": size})
        if not -math.inf < group["beta2_decay"] <= 0:
            raise InvalidError(
                f"beta2_decay is {group['beta2_decay']}: it is at most 0, and finite"
            )
        if not 1 <= group["d"] < math.inf:
            raise InvalidError(f"d is {group['d']}: it is at least 1, and finite")

    def _step(
        self,
        group: dict[str, Any],
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
    ) -> None:
        shape = parameter.shape
        gradient = gradient.to(torch.promote_types(parameter.dtype, torch.float32))
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
            if is_factored(shape):
                state["row_var"] = gradient.new_zeros((*shape[:-1], 1))
                state["col_var"] = gradient.new_zeros((*shape[:-2], 1, shape[-1]))
            else:
                state["variance"] = torch.zeros_like(gradient)
        for name in state.keys() - {"step"}:  # load_state_dict() gives them the parameter's type
            state[name] = state[name].to(gradient.dtype)
        state["step"] += 1
        steps = state["step"].item()
        weight = steps ** group["beta2_decay"]
        least = EPS if group["eps"][0] is None else group["eps"][0]
        size = _rms(parameter)
        if is_factored(shape):
            kind = gradient.dtype
            squares = gradient.double().square()
            rows = state["row_var"].lerp_(squares.mean(-1, keepdim=True).to(kind), weight)
            columns = state["col_var"].lerp_(squares.mean(-2, keepdim=True).to(kind), weight)
            mean = rows.double().mean(-2, keepdim=True).to(kind).clamp_(min=least)
            estimate = (rows * columns).div_(mean)
        else:
            estimate = state["variance"].lerp_(gradient * gradient, weight).clone()
        update = estimate.clamp_(min=least * least).sqrt_().reciprocal_().mul_(gradient)
        rate = max(group["eps"][1], size) * min(group["lr"], 1 / steps**0.5)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-rate / max(1.0, _rms(update) / group["d"]))


class Muon(_Whole):
    """Steps of matrices in an orthogonal direction (Jordan, 2024); AdamW of all else.

    As torch.optim.Muon, with products in float32, which are in bfloat16 there. Parameters with two
    dimensions have such steps, unless their group has ns_steps=0: an embedding's, and that of the
    last layer. All others have AdamW's, and need another rate: give them a group.

        phub.Muon([{"params": hidden, "lr": 0.02}, {"params": rest, "lr": 3e-4, "ns_steps": 0}])

    With `phub.DistributedOptimizer` the box makes the steps. The state is `momentum_buffer` of a
    matrix, and AdamW's of another parameter. Gradients are dense.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        """Raises InvalidError for a value that the box would refuse.

        eps: the least norm that a matrix is divided by; above 0.
        ns_steps: of the iteration; a whole number below 100.
        adjust_lr_fn: the rate is times max(1, rows / columns) ** 0.5 ("original", None), or 0.2 *
            max(rows, columns) ** 0.5 ("match_rms_adamw").
        betas: AdamW's.
        """
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "nesterov": nesterov,
                "eps": eps,
                "ns_steps": ns_steps,
                "adjust_lr_fn": adjust_lr_fn,
                "betas": betas,
            },
        )

    def _check(self, group: dict[str, Any]) -> None:
        _check_eps(group["eps"])
        check_positive({name: group[name] for name in ("lr", "weight_decay", "momentum")})
        if not all(0 <= beta < 1 for beta in group["betas"]):
            raise InvalidError(f"betas are {group['betas']}: they are from 0 to below 1")
        steps = group["ns_steps"]
        if not 0 <= steps < 100 or steps != int(steps):
            raise InvalidError(f"ns_steps is {steps}: it is a whole number from 0 to below 100")
        if group["adjust_lr_fn"] not in ADJUSTS:
            raise InvalidError(f"adjust_lr_fn is {group['adjust_lr_fn']!r}: it is one of {ADJUSTS}")

    def _step(
        self,
        group: dict[str, Any],
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
    ) -> None:
        if parameter.dim() != 2 or not group["ns_steps"]:
            _adamw(group, parameter, gradient, state)
            return
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum = group["momentum"]
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        direction = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
        direction = orthogonalized(direction, group["ns_steps"], group["eps"])
        rows, columns = parameter.shape
        if group["adjust_lr_fn"] == "match_rms_adamw":
            ratio = 0.2 * math.sqrt(max(rows, columns))
        else:
            ratio = math.sqrt(max(1, rows / columns))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(direction, alpha=-group["lr"] * ratio)


def orthogonalized(matrix: torch.Tensor, steps: int, eps: float) -> torch.Tensor:
    """The quintic Newton-Schulz iteration, in the matrix's type."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.size(0) > matrix.size(1)
    norm = torch.linalg.vector_norm(matrix, dtype=torch.float64).clamp(min=eps)
    x: torch.Tensor = matrix / norm.to(matrix.dtype)
    x = x.T if is_tall else x
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.T if is_tall else x


def _adamw(
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
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
    square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = square.sqrt().div_((1 - beta2**steps) ** 0.5).add_(group["eps"])
    parameter.addcdiv_(mean, root, value=-group["lr"] / (1 - beta1**steps))


def _check_eps(eps: float) -> None:
    if not 0 < eps < math.inf:
        raise InvalidError(f"eps is {eps}: it is above 0, and finite")


def _rms(tensor: torch.Tensor) -> float:
    norm: float = torch.linalg.vector_norm(tensor, dtype=torch.float64).item()
    return norm / math.sqrt(tensor.numel())
