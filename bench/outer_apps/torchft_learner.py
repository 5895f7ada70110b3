"""A learner of torchft.local_sgd.DiLoCo: torchft_learner.py PARTS ROUNDS RANK RANKS LIGHTHOUSE."""

import sys
import time
from datetime import timedelta

import torch
from shapes import check, shapes, step_of
from torch.distributed import TCPStore
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

parts, rounds, rank, ranks = (int(word) for word in sys.argv[1:5])
torch.set_num_threads(1)
model = torch.nn.ParameterList([torch.zeros(shape) for shape in shapes(parts)])
inner = torch.optim.SGD(model.parameters(), lr=step_of(rank))
outer = torch.optim.SGD(model.parameters(), lr=1)
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
limit = timedelta(seconds=120)
manager = Manager(
    pg=ProcessGroupGloo(timeout=limit),
    min_replica_size=ranks,
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
    lighthouse_addr=sys.argv[5],
    replica_id=f"learner{rank}",
    hostname="127.0.0.1",
)
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
