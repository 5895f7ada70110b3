"""phub.torchft's process group in torchft's Manager: learners, one of which dies."""

import re
import subprocess

import pytest
from conftest import LIMIT_S, python

LEARNER = """
import hashlib, os, signal, sys
from datetime import timedelta

import torch
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer

from phub.torchft import ProcessGroupPhub

rank, lighthouse = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
limit = timedelta(seconds=60)
manager = Manager(
    pg=ProcessGroupPhub(timeout=limit), min_replica_size=2, use_async_quorum=False,
    load_state_dict=model.load_state_dict, state_dict=model.state_dict, init_sync=False,
    timeout=limit, quorum_timeout=limit, rank=0, world_size=1, store_addr="127.0.0.1",
    store_port=store.port, lighthouse_addr=lighthouse, replica_id=f"learner{rank}",
    hostname="127.0.0.1",
)
ddp = DistributedDataParallel(manager, model)
optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters(), 1e-2))
data = torch.Generator().manual_seed(rank)
sizes = []
while manager.current_step() < 30:
    optimizer.zero_grad()
    ddp(torch.randn(16, 20, generator=data)).square().mean().backward()
    if rank == 2 and manager.current_step() == 15:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    sizes.append(manager.num_participants())
bits = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print("END", sizes.count(3), sizes.count(2), bits.hexdigest(), flush=True)
manager.shutdown(wait=False)
os._exit(0)  # a process with gloo may abort at its end
"""


def test_learners_go_on_without_one_that_died(tmp_path):
    coordination = pytest.importorskip("torchft.coordination")
    (tmp_path / "learner.py").write_text(LEARNER)
    lighthouse = coordination.LighthouseServer(
        bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=20000, quorum_tick_ms=100
    )
    learners = [
        subprocess.Popen(**python("learner.py", str(rank), lighthouse.address()), cwd=tmp_path)
        for rank in range(3)
    ]
    try:
        ends = [learner.communicate(timeout=LIMIT_S) for learner in learners]
    finally:
        for learner in learners:
            learner.kill()
        lighthouse.shutdown()
    print(*(text for end in ends for text in end))
    assert [learner.returncode for learner in learners] == [0, 0, -9]
    found = [re.search(r"^END (\d+) (\d+) (\w+)$", end[0], re.M).groups() for end in ends[:2]]
    assert found[0] == found[1]
    assert int(found[0][0]) >= 15
    assert 14 <= int(found[0][1]) <= 15
