"""A learner of torchft.local_sgd.DiLoCo: torchft_learner.py PARTS ROUNDS RANK RANKS LIGHTHOUSE."""

import sys
import time

import torch
from shapes import check, shapes, step_of
from torchft.local_sgd import DiLoCo
from torchft_manager import manager_of

parts, rounds, rank, ranks = (int(word) for word in sys.argv[1:5])
torch.set_num_threads(1)
model = torch.nn.ParameterList([torch.zeros(shape) for shape in shapes(parts)])
inner = torch.optim.SGD(model.parameters(), lr=step_of(rank))
outer = torch.optim.SGD(model.parameters(), lr=1)
manager = manager_of(model, rank, ranks, sys.argv[5])
# Buckets would leave out layers (findings/diloco-buckets.sh).
with DiLoCo(manager, [model], inner, outer, sync_every=1):
    for round in range(1, rounds + 1):
        for weight in model.parameters():
            weight.grad = torch.tensor(-1.0).expand(weight.shape)  # without memory of its own
        began = time.monotonic()
        inner.step()
        if rank == 0:
            print("SECONDS", time.monotonic() - began, flush=True)
        check([weight.detach() for weight in model.parameters()], round, ranks)
manager.shutdown(wait=False)
