#!/usr/bin/env bash
# A rate in a tensor, as PyTorch's tutorial of compiled optimizers with schedulers asks for, and two
# groups of parameters. The tutorial does not say that the groups have one tensor then. What
# schedulers confused within a group is known, and fixed: pytorch #126854, #162359.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install torch==2.13.0 numpy==2.4.6

seen=$("$python" -W ignore - 2>"$errors" <<'PYTHON'
import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

SCHEDULERS = {
    "ReduceLROnPlateau(factor=0.5)": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda n: 1 / (1 + n), lambda n: 1]),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.5], total_steps=10, cycle_momentum=False),
    "SWALR": lambda o: SWALR(o, [0.01, 0.1], anneal_epochs=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
}


def rates(make, rate):
    """Of two groups after the second step of a scheduler."""
    layers = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(2))
    optimizer = torch.optim.AdamW([{"params": layer.parameters()} for layer in layers], lr=rate)
    scheduler = make(optimizer)
    for _ in range(2):
        optimizer.step()
        scheduler.step(*[1.0] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
    return " and ".join(f"{float(group['lr']):.3g}" for group in optimizer.param_groups)


print(torch.__version__.split("+")[0])
for name, make in SCHEDULERS.items():
    print(f"{name}: float {rates(make, 0.1)}, tensor {rates(make, torch.tensor(0.1))}")
PYTHON
)
verdict 'a scheduler sets the same rates with lr=torch.tensor(0.1) as with lr=0.1' "$seen" \
  "2.13.0
ReduceLROnPlateau(factor=0.5): float 0.05 and 0.05, tensor 0.025 and 0.025
LambdaLR: float 0.0333 and 0.1, tensor 0.1 and 0.1
OneCycleLR: float 0.1 and 0.5, tensor 0.5 and 0.5
SWALR: float 0.055 and 0.1, tensor 0.1 and 0.1
ExponentialLR: float 0.025 and 0.025, tensor 0.025 and 0.025"
