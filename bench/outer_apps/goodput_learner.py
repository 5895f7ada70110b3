"""A learner of phub.DiLoCo that computes for a stated time: goodput_learner.py PARTS SECONDS STEP_MS QUORUM GRACE_MS.

Prints when it went on after each exchange, and how long the exchange took, in seconds.
"""

import json
import os
import sys
import time

import phub
import torch
from shapes import shapes

parts, seconds, step_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]) / 1000
quorum = {"quorum": int(sys.argv[4]), "grace_ms": int(sys.argv[5])} if int(sys.argv[4]) else {}
torch.set_num_threads(1)
model = torch.nn.ParameterList([torch.zeros(shape) for shape in shapes(parts)])
for weight in model.parameters():
    weight.grad = torch.ones_like(weight)
inner = torch.optim.SGD(model.parameters(), lr=1e-3)
with phub.DiLoCo(model, inner, sync_every=1, lr=0.7, momentum=0.9, on_loss="shrink", **quorum):
    print("JOINED", flush=True)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(step_s)  # as if it computed
        began = time.monotonic()
        inner.step()
        now = time.monotonic()
        print(json.dumps([now, now - began]), flush=True)
