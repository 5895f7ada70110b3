#!/usr/bin/env bash
# The order in which torch.stack(g).sum(0) adds, and what becomes of -0.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install torch==2.13.0 numpy==2.4.6

seen=$("$python" - <<'PYTHON'
import torch

torch.set_num_threads(1)
torch.manual_seed(0)


def differs(ranks, elements):
    """The part of the elements that adding in order would give other bits."""
    wrong = total = 0
    for _ in range(200):
        gradients = [torch.randn(elements) for _ in range(ranks)]
        in_order = gradients[0].clone()
        for gradient in gradients[1:]:
            in_order += gradient
        wrong += (torch.stack(gradients).sum(0) != in_order).sum().item()
        total += elements
    return wrong / total


def word(part):
    return "none" if part == 0 else "few" if part < 0.1 else "many"


print(torch.__version__.split("+")[0], end="; ")
for ranks in (4, 5, 17, 18):
    print(ranks, "tensors:", ", ".join(f"{word(differs(ranks, n))} of {n}" for n in (16, 1000, 1024)), end="; ")
zeros = [torch.tensor([-0.0])] * 3
print("-0 becomes", "-0" if torch.signbit(torch.stack(zeros).sum(0)) else "+0", end=", ")
print("and with sum()", "-0" if torch.signbit(sum(zeros)) else "+0", end="; ")
total = torch.randn(100_000)
parts = [(total / n != total * torch.tensor(1 / n)).float().mean().item() for n in (2, 3, 4, 7)]
print("/ n is not * float(1/n) for n of 2, 3, 4, 7 in", ", ".join(f"{round(100 * p)}%" for p in parts))
PYTHON
)
verdict 'torch.stack(g).sum(0) adds in the order of g, as a loop does' "$seen" \
  '2.13.0; 4 tensors: none of 16, none of 1000, none of 1024; 5 tensors: many of 16, few of 1000, none of 1024; 17 tensors: many of 16, few of 1000, none of 1024; 18 tensors: many of 16, many of 1000, many of 1024; -0 becomes +0, and with sum() +0; / n is not * float(1/n) for n of 2, 3, 4, 7 in 0%, 33%, 0%, 54%'
