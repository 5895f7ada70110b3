"""What PyTorch's optimizers are at the box: their names, the values of a group, their state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import SGD, Adadelta, Adagrad, Adam, AdamW, Optimizer, RMSprop, SparseAdam

from phub._options import MAX_DIMENSIONS
from phub.errors import InvalidError
from phub.lion import Lion
from phub.trust import Lamb, Lars
from phub.whole import ADJUSTS, COEFFICIENTS, EPS, OF_TORCH, Adafactor, Muon, is_factored

WAY_OUT = "use server=False: the box averages the gradients, and every rank makes the step itself"
_REFUSED = ("amsgrad", "maximize", "centered", "capturable", "differentiable")
_OURS = (Lion, Lars, Lamb, Adafactor, Muon)
_KINDS = (
    *(SGD, Adam, AdamW, Adagrad, RMSprop, Adadelta, SparseAdam),
    *(*OF_TORCH, *_OURS),
)


def name_of(optimizer: Optimizer) -> str:
    """The box's name of the optimizer. Raises InvalidError if the box does not make its steps."""
    kind = type(optimizer)
    if kind not in _KINDS:
        known = ", ".join(dict.fromkeys(each.__name__ for each in _KINDS))
        raise InvalidError(f"the box makes the steps of {known}, not of {kind.__name__}: {WAY_OUT}")
    for number, group in enumerate(optimizer.param_groups):
        for flag in _REFUSED:
            if group.get(flag):
                raise InvalidError(
                    f"group {number} has {flag}={group[flag]}, which the box does not do: {WAY_OUT}"
                )
        if tuple(group.get("ns_coefficients", COEFFICIENTS)) != COEFFICIENTS:
            raise InvalidError(
                f"group {number} has ns_coefficients {group['ns_coefficients']}, and at the box "
                f"they are {COEFFICIENTS}: {WAY_OUT}"
            )
        if group.get("initial_accumulator_value"):
            raise InvalidError(
                f"group {number} has an initial_accumulator_value, and at the box sums begin at 0: "
                f"{WAY_OUT}"
            )
        most = max((p.dim() for p in group["params"]), default=0)
        if kind.__name__ == "Adafactor" and most > MAX_DIMENSIONS:
            raise InvalidError(
                f"group {number} has a parameter of {most} dimensions, and at the box Adafactor's "
                f"have {MAX_DIMENSIONS} at most: {WAY_OUT}"
            )
    names = [_name_in(kind, group) for group in optimizer.param_groups]
    for number, name in enumerate(names):
        if name != names[0]:
            raise InvalidError(
                f"group 0 is {names[0]} and group {number} is {name}, and the box makes one kind "
                f"of step: {WAY_OUT}"
            )
    return names[0]


def _name_in(kind: type[Optimizer], group: Mapping[str, Any]) -> str:
    if kind is SGD:
        if not group["momentum"]:
            return "sgd"
        return "nesterov" if group["nesterov"] else "momentum"
    if kind is SparseAdam:
        return "sparse-adam"
    if issubclass(kind, Adam):
        return "adamw" if group.get("decoupled_weight_decay", kind is AdamW) else "adam"
    return kind.__name__.lower()


def fixed_values(name: str, groups: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The hyperparameters that the job begins with and that cannot change."""
    if name == "muon":
        return {
            f"ns_steps@{number}": float(group["ns_steps"])
            for number, group in enumerate(groups)
            if any(p.requires_grad and p.numel() for p in group["params"])
        }
    if name != "rmsprop":
        return {}
    momenta = {float(group["momentum"]) for group in groups}
    if len(momenta) > 1:
        raise InvalidError(f"RMSprop's groups have momenta {sorted(momenta)}: {WAY_OUT}")
    return {"rmsprop_momentum": momenta.pop()}


# What decides how much state there is, by the names of the groups.
_FIXED = {"muon": "ns_steps", "rmsprop": "momentum"}


def check_fixed(
    name: str, before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]
) -> None:
    """Raises InvalidError if a group has another value that cannot change than it had."""
    field = _FIXED.get(name)
    for number, (old, new) in enumerate(zip(before, now, strict=False)):
        if field is not None and new.get(field) != old[field]:
            raise InvalidError(
                f"group {number} has {field}={new.get(field)}, and the job began with "
                f"{old[field]}: it cannot change, since it decides how much state there is"
            )


def check_schedule(schedule: Mapping[str, float]) -> None:
    """Raises InvalidError for a name that is no setting of a schedule of the learning rate."""
    for name in schedule:
        if not name.startswith("lr_") or name.split("@")[0] == "lr_decay":
            raise InvalidError(
                f"schedule has '{name}', which the optimizer's groups have; a schedule's are "
                "lr_warmup, lr_exponential, lr_inverse, lr_polynomial, lr_cosine and what they need"
            )


def goes_by_keys(name: str) -> bool:
    """The box makes the optimizer's steps of whole keys, or by their norms: in gated rounds."""
    return name in ("lars", "lamb", "adafactor", "muon")


# The hyperparameters of some optimizers, beside those of all, by the box's names: a group's.
_MORE = {
    "momentum": {"momentum": "momentum", "dampening": "dampening"},
    "nesterov": {"momentum": "momentum", "dampening": "dampening"},
    "lars": {
        "always_adapt": "always_adapt",
        "momentum": "momentum",
        "trust_coeff": "trust_coeff",
    },
    "lamb": {"always_adapt": "always_adapt"},
    "adagrad": {"lr_decay": "lr_decay"},
    "rmsprop": {"alpha": "alpha"},
    "adadelta": {"rho": "rho"},
    "adafactor": {"clip_threshold": "d"},
    "muon": {"momentum": "momentum", "nesterov": "nesterov"},
}


def values_of(name: str, group: Mapping[str, Any]) -> dict[str, float]:
    """The hyperparameters of a group, by the box's names."""
    fields = {"lr": "lr", **_MORE.get(name, {})}
    if name != "sparse-adam":
        fields["weight_decay"] = "weight_decay"
    if name not in ("sgd", "momentum", "nesterov", "lion", "adafactor"):
        fields["eps"] = "eps"
    values = {ours: float(group[theirs]) for ours, theirs in fields.items()}
    if name == "muon":
        values["match_rms"] = float(group["adjust_lr_fn"] == ADJUSTS[-1])
    if name == "adafactor":
        least, values["eps2"] = group["eps"]
        values["eps"] = EPS if least is None else least
        values["beta2_power"] = -float(group["beta2_decay"])
    if "betas" in group:
        values["beta1"], values["beta2"] = (float(beta) for beta in group["betas"])
    return values


def torch_state(
    name: str, steps: int, arrays: Mapping[str, torch.Tensor], group: Mapping[str, Any]
) -> dict[str, Any]:
    """A parameter's state as PyTorch's optimizer has it after so many steps.

    Before the first one it is zeros: torch.distributed.checkpoint loads only into what is there.
    """
    if name in ("sgd", "momentum", "nesterov", "lion", "lars"):
        return {**arrays}
    if name == "adafactor":
        return {"step": torch.tensor(float(steps)), **_moments(arrays["variance"])}
    if name == "muon":
        first, second = arrays["momentum_buffer"], arrays["exp_avg_sq"]
        if first.dim() == 2 and group["ns_steps"]:
            return {"momentum_buffer": first}
        arrays = {"exp_avg": first, "exp_avg_sq": second}
    # SparseAdam counts in an int.
    return {"step": steps if name == "sparse-adam" else torch.tensor(float(steps)), **arrays}


def box_state(
    states: Sequence[str], parameter: torch.Tensor, state: Mapping[str, Any]
) -> tuple[int, list[torch.Tensor]]:
    """Steps and arrays for the box, of a parameter's state in PyTorch's optimizer."""
    if "row_var" in state:
        state = {**state, "variance": _variance_of(parameter.shape, state)}
    if "exp_avg" in state:  # Muon's, of a parameter that is no matrix, lies where the others' is
        state = {"momentum_buffer": state["exp_avg"], **state}
    given = [state.get(each) for each in states]
    # SGD, Lion and Lars do not count: what matters is whether there is a buffer with something in
    # it.
    steps = (
        int(state["step"])
        if "step" in state
        else int(any(e is not None and e.any() for e in given))
    )
    arrays = [
        torch.zeros(parameter.shape) if each is None else each.detach().float().contiguous()
        for each in given
    ]
    return steps, arrays


def _moments(array: torch.Tensor) -> dict[str, torch.Tensor]:
    """Adafactor's, of the array at the box: it begins with the means, and the rest is zero."""
    shape = array.shape
    if not is_factored(shape):
        return {"variance": array}
    flat = array.reshape(-1)
    rows, columns = flat.numel() // shape[-1], flat.numel() // shape[-2]
    return {
        "row_var": flat[:rows].reshape((*shape[:-1], 1)).clone(),
        "col_var": flat[rows : rows + columns].reshape((*shape[:-2], 1, shape[-1])).clone(),
    }


def _variance_of(shape: torch.Size, state: Mapping[str, Any]) -> torch.Tensor:
    """The reverse. Raises InvalidError for a side of 1, which is not factored at the box."""
    if not is_factored(shape):
        raise InvalidError(
            f"a parameter of shape {tuple(shape)} has row_var and col_var, and at the box it has a "
            f"variance: {WAY_OUT}"
        )
    array = torch.zeros(shape)
    means = torch.cat(
        [state[each].detach().float().cpu().reshape(-1) for each in ("row_var", "col_var")]
    )
    array.view(-1)[: means.numel()] = means
    return array
