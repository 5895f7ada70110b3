"""Loss scaling where the box makes the steps."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from phub.errors import InvalidError
from phub.optimizer import DistributedOptimizer

_LEAST_SCALE = 1e-30  # that the box divides by


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler for a DistributedOptimizer: `scaler = phub.GradScaler(optimizer)`.

    Then as usual: `scaler.scale(loss).backward()`, `scaler.step(optimizer)`, `scaler.update()`.
    Gradients go to the box as they are scaled, and the box divides their sum. All ranks leave out
    a step whose sum has a NaN or an infinity, whichever rank it comes from, and so have the same
    scale. Where scales are powers of two, steps have the bits that they have without scaling.
    """

    def __init__(self, optimizer: DistributedOptimizer, **options: Any) -> None:
        """Belongs to the optimizer from now on. Between steps.

        optimizer: made with on_nonfinite="skip".
        options: of torch.amp.GradScaler: init_scale, growth_factor, backoff_factor,
            growth_interval, enabled; and device, which must be that of the parameters.
        """
        device = optimizer.param_groups[0]["params"][0].device.type
        if torch.device(options.pop("device", device)).type != device:
            raise InvalidError(
                f"GradScaler: the optimizer's parameters are on device '{device}': leave device out"
            )
        super().__init__(device, **options)
        if self.is_enabled():
            optimizer.use_scale(self.get_scale)
        self._optimizer = optimizer
        self._stepped = False

    def unscale_(self, optimizer: Optimizer) -> None:
        """Raises RuntimeError: the box does it."""
        if self.is_enabled():
            raise RuntimeError(
                "unscale_(): the box divides the gradients by the scale. To clip them, use "
                "DistributedOptimizer(max_norm=…), which clips what is divided"
            )

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Makes the optimizer's step, which must be the one that this was made of."""
        if optimizer is not self._optimizer:
            raise RuntimeError(
                "a phub.GradScaler is for the DistributedOptimizer that it was made of: make one "
                "for each optimizer"
            )
        if self.is_enabled() and self._scale is None:
            raise RuntimeError("step() before scale(): call scaler.scale(loss).backward()")
        loss = self._optimizer.step(*args, **kwargs)
        self._stepped = True
        return loss

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Lowers the scale after a step that was left out, and raises it after many others.

        With overlap="forward" it waits for the step's first result. Raises RuntimeError when the
        scale has become less than the box takes, as it does where every step is left out.
        """
        stepped, self._stepped = self._stepped, False
        if self.is_enabled() and new_scale is None:
            if not stepped:
                raise RuntimeError("update() before step(): call scaler.step(optimizer)")
            skipped = self._optimizer.await_skipped()
            found = torch.full((), float(skipped), device=self._device)
            self._per_optimizer_states[id(self._optimizer)]["found_inf_per_device"] = {
                found.device: found
            }
            super().update()
            if skipped and self.get_scale() < _LEAST_SCALE:
                raise RuntimeError(
                    f"the scale has become {self.get_scale():.1g}, as every step was left out: a "
                    "gradient has a NaN or an infinity whatever the scale is; look for it in the "
                    "loss and the inputs"
                )
            return
        super().update(new_scale)
