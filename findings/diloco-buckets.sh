#!/usr/bin/env bash
# DiLoCo with torchft: two learners, whose weights are 0, add 1 and 3 to each weight in one inner
# step, and exchange. The outer optimizer is SGD with a learning rate of 1, so each weight becomes
# the mean, 2. The model has four layers of 1 MiB. use_bucketization gathers layers in buckets of
# bucket_cap_mb, and each is averaged by one all-reduce.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install torchft==0.2.0 torch==2.14.1 numpy==2.4.6

cat >"$folder/learner.py" <<'PYTHON'
import sys
from datetime import timedelta

import torch
from torch import nn
from torch.distributed import TCPStore
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

rank, lighthouse, cap = int(sys.argv[1]), sys.argv[2], sys.argv[3]
model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
for weight in model.parameters():
    nn.init.zeros_(weight)
inner, outer = torch.optim.SGD(model.parameters(), lr=1), torch.optim.SGD(model.parameters(), lr=1)
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
limit = timedelta(seconds=60)
manager = Manager(
    pg=ProcessGroupGloo(timeout=limit),
    min_replica_size=2,
    load_state_dict=model.load_state_dict,
    state_dict=model.state_dict,
    use_async_quorum=False,
    init_sync=False,
    timeout=limit,
    quorum_timeout=limit,
    rank=0,
    world_size=1,
    store_addr="127.0.0.1",
    store_port=store.port,
    lighthouse_addr=lighthouse,
    replica_id=f"learner{rank}",
    hostname="127.0.0.1",
)
buckets = {} if cap == "none" else {"use_bucketization": True, "bucket_cap_mb": float(cap)}
with DiLoCo(manager, [model], inner, outer, sync_every=1, **buckets):
    for weight in model.parameters():
        weight.grad = torch.full_like(weight, -3.0 if rank else -1.0)
    inner.step()
layers = [sorted(set(weight.detach().flatten().tolist())) for weight in model.parameters()]
print(" ".join("/".join(f"{value:g}" for value in layer) for layer in layers))
manager.shutdown(wait=False)
PYTHON

seen=$("$python" -W ignore - "$folder/learner.py" 2>"$errors" <<'PYTHON'
import subprocess
import sys
from importlib.metadata import version

from torchft.coordination import LighthouseServer

print("torchft", version("torchft"))
for cap in ("none", "4", "2", "1.5", "0.5"):
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=30000)
    learners = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", sys.argv[1], rank, lighthouse.address(), cap],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    weights = [learner.communicate(timeout=120)[0].strip() for learner in learners]
    lighthouse.shutdown()
    print(f"buckets {cap}:", ", ".join(weights))
PYTHON
)
verdict 'both learners have 2 in every layer, whatever the size of a bucket' "$seen" \
  "torchft 0.2.0
buckets none: 2 2 2 2, 2 2 2 2
buckets 4: 2 2 2 2, 2 2 2 2
buckets 2: 1 1 2 2, 3 3 2 2
buckets 1.5: 1 1 2 1, 3 3 2 3
buckets 0.5: 1 1 1 1, 3 3 3 3"
