"""What a DiLoCo does before and after the steps of its inner optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from phub._outer_keys import OuterKey


def hooks_of(
    inner: Sequence[Optimizer],
    stepped: Callable[[], None],
    keys: Sequence[OuterKey],
    proximal: float,
) -> list[Any]:
    """Calls stepped() after each step of the last one; with `proximal` changes gradients before.

    They keep the DiLoCo alive: an optimizer that goes on without one would train alone.
    """
    have_stepped: set[int] = set()

    def note(optimizer: Optimizer, *_: object) -> None:
        have_stepped.add(id(optimizer))

    def last_has_stepped(*_: object) -> None:
        for at, each in enumerate(inner[:-1]):
            if id(each) not in have_stepped:
                raise RuntimeError(
                    f"the last of {len(inner)} inner optimizers has made a step, and number {at}, "
                    f"{type(each).__name__}, has made none: give DiLoCo the one that steps last as "
                    "the last one"
                )
        stepped()

    def before_step(optimizer: Optimizer, arguments: Any, named: Any) -> None:
        closure = arguments[1] if len(arguments) > 1 else named.get("closure")
        _pull(optimizer, keys, proximal, has_closure=closure is not None)

    hooks: list[Any] = [each.register_step_post_hook(note) for each in inner[:-1]]
    hooks.append(inner[-1].register_step_post_hook(last_has_stepped))
    if proximal:
        hooks += [each.register_step_pre_hook(before_step) for each in inner]
    return hooks


def _pull(
    optimizer: Optimizer, keys: Sequence[OuterKey], proximal: float, *, has_closure: bool
) -> None:
    """FedProx: the gradients are those of the loss with its proximal term."""
    if has_closure or getattr(optimizer, "grad_scale", None) is not None:
        what = "a closure computes" if has_closure else "a fused optimizer unscales"
        raise RuntimeError(
            f"proximal={proximal}: {what} the gradients within step(), where the "
            "proximal term cannot be added. Add it to the loss, and leave proximal out"
        )
    ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for key in keys:
        key.pull_towards_base(proximal, ids)
