"""A learner of torchft's DiLoCo that trains until it is killed.

  torchft_kill.py PARTS STEP_MS RANK RANKS LIGHTHOUSE

Prints when it went on after each round in which something was exchanged, and how long that took.
"""

import json
import sys
import time

import torch
from shapes import shapes
from torchft.local_sgd import DiLoCo
from torchft_manager import manager_of

parts, step_s, rank, ranks = int(sys.argv[1]), float(sys.argv[2]) / 1000, *map(int, sys.argv[3:5])
torch.set_num_threads(1)
model = torch.nn.ParameterList([torch.zeros(shape) for shape in shapes(parts)])
inner = torch.optim.SGD(model.parameters(), lr=1e-3)
outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
manager = manager_of(model, rank, ranks - 1, sys.argv[5])
began, done = time.monotonic(), 0
with DiLoCo(manager, [model], inner, outer, sync_every=1):
    while True:
        for weight in model.parameters():
            weight.grad = torch.ones_like(weight)
        time.sleep(step_s)  # as if it computed
        began = time.monotonic()
        inner.step()
        now = time.monotonic()
        if manager.current_step() > done:  # else the round was discarded
            done = manager.current_step()
            print(json.dumps([now, now - began]), flush=True)
