#!/usr/bin/env bash
# torch.nn.utils.vector_to_parameters, with which local SGD and federated training give models the
# mean of their parameters. Its page: "Copy slices of a vector into an iterable of parameters."
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install torch==2.13.0 numpy==2.4.6

seen=$("$python" -W ignore - 2>"$errors" <<'PYTHON'
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def weight(model):
    return [round(number, 2) for number in model.weight.flatten().tolist()]


workers = [torch.nn.Linear(2, 1, bias=False) for _ in range(2)]
mean = torch.tensor([1.0, 2.0])
for worker in workers:
    vector_to_parameters(mean, worker.parameters())
# The first one trains, the second does not.
optimizer = torch.optim.SGD(workers[0].parameters(), lr=1.0)
workers[0](torch.ones(1, 2)).sum().backward()
optimizer.step()
print(torch.__version__.split("+")[0])
print("weights after a step of the first:", *map(weight, workers), "and the mean", mean.tolist())

worker = workers[0]
summed = parameters_to_vector(worker.parameters()).detach()
vector_to_parameters(summed, worker.parameters())
summed.zero_()  # the array is used again
print("weights after their array was cleared:", weight(worker))
PYTHON
)
verdict 'each model has a copy: the second one, and the vector, stay as they are' "$seen" \
  "2.13.0
weights after a step of the first: [0.0, 1.0] [0.0, 1.0] and the mean [0.0, 1.0]
weights after their array was cleared: [0.0, 0.0]"
