#!/usr/bin/env bash
# SGD(fused=True) with momentum when a GradScaler leaves out the first step, as it often does.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install torch==2.13.0 numpy==2.4.6

seen=$("$python" - <<'PYTHON'
import torch

torch.set_num_threads(1)
# What PyTorch gives out without setting it is NaN under this mode, and else whatever was there.
torch.use_deterministic_algorithms(True)


def trained(fused):
    parameter = torch.nn.Parameter(torch.ones(40))
    optimizer = torch.optim.SGD([parameter], 0.1, momentum=0.9, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    values = []
    for step in range(3):
        optimizer.zero_grad()
        loss = (parameter * parameter).sum() * (float("inf") if step == 0 else 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        values.append(f"{parameter[0].item():.2f}")
    return " ".join(values)


print(f"{torch.__version__.split('+')[0]}; plain: {trained(False)}; fused: {trained(True)}")
PYTHON
)
verdict 'the step is left out, and momentum begins with the next one, as without fused' "$seen" \
  '2.13.0; plain: 1.00 0.80 0.46; fused: 1.00 nan nan'
