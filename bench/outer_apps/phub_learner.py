"""A learner of phub.DiLoCo: phub_learner.py PARTS ROUNDS, with PHUB_SERVER, RANK and WORLD_SIZE."""

import os
import sys
import time

import phub
import torch
from shapes import check, shapes, step_of

parts, rounds = int(sys.argv[1]), int(sys.argv[2])
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
model = torch.nn.ParameterList([torch.zeros(shape) for shape in shapes(parts)])
for weight in model.parameters():
    weight.grad = torch.tensor(-1.0).expand(weight.shape)  # without memory of its own
inner = torch.optim.SGD(model.parameters(), lr=step_of(rank))
with phub.DiLoCo(model, inner, sync_every=1, lr=1, momentum=0, nesterov=False):
    began = time.monotonic()
    for round in range(1, rounds + 1):
        inner.step()
        now = time.monotonic()
        if rank == 0:
            print("SECONDS", now - began, flush=True)
        began = now
        check([weight.detach() for weight in model.parameters()], round, ranks)
        began += time.monotonic() - now  # of the check
