#!/usr/bin/env bash
# Whether reading an optimizer's state for a checkpoint changes the training.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install torch==2.13.0 numpy==2.4.6

seen=$("$python" -W ignore - <<'PYTHON'
import torch
from torch import optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

torch.set_num_threads(1)
OPTIMIZERS = {
    "SGD with momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "SGD with dampening": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "Adagrad": (optim.Adagrad, {"lr": 0.1}),
    "AdamW": (optim.AdamW, {"lr": 0.1}),
    "Rprop": (optim.Rprop, {"lr": 0.1}),
}


def first_step(name, read):
    """How far the first step moves a parameter whose gradient is 1."""
    make, values = OPTIMIZERS[name]
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = make(model.parameters(), **values)
    if read:
        get_optimizer_state_dict(model, optimizer)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    return -model.weight.item()


print(torch.__version__.split("+")[0])
for name in OPTIMIZERS:
    plain, read = first_step(name, False), first_step(name, True)
    print(f"{name}: {plain:.3g}" + (f", after the state was read {read:.3g}" if read != plain else " in both"))
PYTHON
)
verdict 'get_optimizer_state_dict reads: a program that calls it before its first step trains as without' "$seen" \
  "2.13.0
SGD with momentum: 0.1 in both
SGD with dampening: 0.1, after the state was read 0.05
Adagrad: 0.1 in both
AdamW: 0.1, after the state was read 0.0744
Rprop: 0.1, after the state was read 1e-06"
