#!/usr/bin/env bash
# fused=True on a CPU, with a parameter whose memory has another order than its gradient or its
# state: a transposed weight (or one in channels_last), and a gradient that was cut out of a summed
# flat array, or a state that was saved before. On a GPU it is an error (pytorch #106951).
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install torch==2.13.0 numpy==2.4.6

seen=$("$python" -W ignore - 2>"$errors" <<'PYTHON'
import torch
from torch import optim

OPTIMIZERS = {
    "SGD": (optim.SGD, {}),
    "Adam": (optim.Adam, {}),
    "AdamW": (optim.AdamW, {"weight_decay": 0}),
    "Adagrad": (optim.Adagrad, {}),
}
# The gradients of all ranks, added up in one flat array.
SUMMED = torch.tensor([1.0, -1.0, 1.0, 1.0])


def zeros():
    return torch.nn.Parameter(torch.zeros(2, 2).t())


def step(kind, options, fused):
    weight = zeros()
    weight.grad = SUMMED.view(2, 2)
    kind([weight], lr=1.0, foreach=False, fused=fused, **options).step()
    return weight.detach().round().int().tolist()


def resume(fused):
    """The parameter after a step without a gradient, with a loaded momentum of [[1, 2], [3, 4]]."""
    saved = torch.nn.Parameter(torch.zeros(2, 2))
    first = optim.SGD([saved], lr=1.0, momentum=1.0)
    saved.grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    first.step()
    weight = zeros()
    second = optim.SGD([weight], foreach=False, fused=fused)
    state = first.state_dict()
    state["param_groups"][0].update(foreach=False, fused=fused)
    second.load_state_dict(state)
    weight.grad = torch.zeros_like(weight)
    second.step()
    return weight.detach().int().tolist()


print(torch.__version__.split("+")[0], "with the gradient", SUMMED.view(2, 2).int().tolist())
for name, (kind, options) in OPTIMIZERS.items():
    print(f"{name}: {step(kind, options, False)}, fused {step(kind, options, True)}")
print(f"SGD, loaded momentum: {resume(False)}, fused {resume(True)}")
PYTHON
)
verdict 'a fused step changes the same elements as one that is not, or is refused' "$seen" \
  "2.13.0 with the gradient [[1, -1], [1, 1]]
SGD: [[-1, 1], [-1, -1]], fused [[-1, -1], [1, -1]]
Adam: [[-1, 1], [-1, -1]], fused [[-1, -1], [1, -1]]
AdamW: [[-1, 1], [-1, -1]], fused [[-1, -1], [1, -1]]
Adagrad: [[-1, 1], [-1, -1]], fused [[-1, -1], [1, -1]]
SGD, loaded momentum: [[-1, -2], [-3, -4]], fused [[-1, -3], [-2, -4]]"
