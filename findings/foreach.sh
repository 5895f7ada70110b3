#!/usr/bin/env bash
# Whether foreach=True and fused=True have the bits of foreach=False, on a CPU.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install torch==2.13.0 numpy==2.4.6

seen=$("$python" - <<'PYTHON'
import torch
from torch import optim

torch.set_num_threads(1)
OPTIMIZERS = {
    "SGD": (optim.SGD, {"lr": 0.1}),
    "SGD with momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "Adam": (optim.Adam, {}),
    "AdamW": (optim.AdamW, {}),
    "Adagrad": (optim.Adagrad, {}),
    "RMSprop": (optim.RMSprop, {}),
    "Adadelta": (optim.Adadelta, {}),
    "Adamax": (optim.Adamax, {}),
    "Rprop": (optim.Rprop, {}),
    "NAdam": (optim.NAdam, {}),
    "RAdam": (optim.RAdam, {}),
    "ASGD": (optim.ASGD, {}),
}
FUSED = ("SGD", "SGD with momentum", "Adam", "AdamW", "Adagrad")


def trained(name, dtype, **how):
    make, values = OPTIMIZERS[name]
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(1003).to(dtype)) for _ in range(3)]
    optimizer = make(parameters, **values, **how)
    for _ in range(5):
        for parameter in parameters:
            parameter.grad = torch.randn(1003).to(dtype)
        optimizer.step()
    return torch.cat([parameter.detach() for parameter in parameters])


def others(names, dtype, **how):
    print([n for n in names if (trained(n, dtype, foreach=False) != trained(n, dtype, **how)).any()])


print(torch.__version__.split("+")[0])
print("foreach=True has other bits in float32:", end=" ")
others(OPTIMIZERS, torch.float32, foreach=True)
print("in bfloat16:", end=" ")
others(OPTIMIZERS, torch.bfloat16, foreach=True)
print("fused=True has other bits in float32:", end=" ")
others(FUSED, torch.float32, fused=True)
print("in bfloat16:", end=" ")
others(FUSED, torch.bfloat16, fused=True)
PYTHON
)
verdict 'foreach and fused change the speed of an optimizer' "$seen" \
  "2.13.0
foreach=True has other bits in float32: ['NAdam', 'RAdam', 'ASGD']
in bfloat16: ['SGD with momentum', 'Adagrad', 'RMSprop', 'Adadelta', 'NAdam', 'RAdam', 'ASGD']
fused=True has other bits in float32: ['SGD with momentum', 'Adam', 'AdamW', 'Adagrad']
in bfloat16: ['SGD', 'SGD with momentum', 'Adam', 'AdamW', 'Adagrad']"
