#!/usr/bin/env bash
# The second moment of an 8-bit AdamW whose gradient becomes a hundred times smaller, while other
# elements of its block keep theirs. In float32 it falls by a thousandth with each step.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install torch==2.13.0 bitsandbytes==0.50.2 numpy==2.4.6

cat >"$folder/moment.py" <<'PYTHON'
from importlib.metadata import version

import bitsandbytes
import torch

STEPS, LARGE, ELEMENTS, OFTEN = 2000, 20, 4096, 64


def trained(optimizer_of):
    """The optimizer, and the length of the last step of an element whose gradient has become small."""
    parameter = torch.nn.Parameter(torch.zeros(ELEMENTS))
    optimizer = optimizer_of([parameter])
    stays = torch.arange(ELEMENTS) % OFTEN == 0
    for step in range(STEPS):
        parameter.grad = torch.where(stays | torch.tensor(step < LARGE), 1.0, 0.01)
        before = parameter.detach().clone()
        optimizer.step()
    return optimizer.state[parameter], (before - parameter.detach())[1].item()


def line(name, moment, step):
    print(f"{name}: exp_avg_sq {moment:.1g}, a step of {1e6 * step:.0f} millionths")


torch.set_num_threads(1)
print(f"torch {version('torch').split('+')[0]}, bitsandbytes {version('bitsandbytes')}")
state, step = trained(lambda all: torch.optim.AdamW(all, 1e-3, weight_decay=0))
line("float32", state["exp_avg_sq"][1].item(), step)
state, step = trained(lambda all: bitsandbytes.optim.AdamW8bit(all, 1e-3, weight_decay=0, min_8bit_size=1))
code = int(state["state2"].flatten()[1])
line("8 bits", (state["qmap2"][code] * state["absmax2"][0]).item(), step)
PYTHON
seen=$("$python" "$folder/moment.py" 2>"$errors")
verdict 'the moment of 8 bits falls as that of float32 does, to some percent, and steps grow alike' \
  "$seen" \
  "torch 2.13.0, bitsandbytes 0.50.2
float32: exp_avg_sq 0.003, a step of 175 millionths
8 bits: exp_avg_sq 0.2, a step of 43 millionths"
