#!/usr/bin/env bash
# A StatefulDataLoader that is saved at the end of an epoch, and loaded by the program that goes on
# with the next one. torchdata's pages say that the state goes to the next iterator. That an epoch
# is lost so was an error (torchdata #1437, closed); its own sampler still does it (in part #1513).
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install torch==2.13.0 torchdata==0.11.0 numpy==2.4.6

cat >"$folder/load.py" <<'PYTHON'
import sys
from importlib.metadata import version

from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

DATA = list(range(12))


def epoch(loader, number):
    loader.sampler.set_epoch(number)
    return [int(sample) for batch in loader for sample in batch]


def run(sampler, workers):
    """Whether a loader that was saved after epoch 0 has the epochs 1 and 2 that follow."""

    def made():
        return StatefulDataLoader(DATA, 2, sampler=sampler(DATA, num_replicas=2, rank=0), num_workers=workers)

    whole, first, second = made(), made(), made()
    expected = [epoch(whole, number) for number in range(3)]
    epoch(first, 0)
    second.load_state_dict(first.state_dict())
    for number in (1, 2):
        found = epoch(second, number)
        yield f"{number} {'right' if found == expected[number] else found}"


if __name__ == "__main__":
    print("torchdata", version("torchdata").split("+")[0])
    for sampler in (DistributedSampler, StatefulDistributedSampler):
        for workers in (2, 0):
            print(f"{sampler.__name__}, {workers} workers: epoch", ", epoch ".join(run(sampler, workers)))
PYTHON
seen=$("$python" -W ignore "$folder/load.py" 2>"$errors")
verdict 'the epoch after the saved one has all of its samples' "$seen" \
  "torchdata 0.11.0
DistributedSampler, 2 workers: epoch 1 right, epoch 2 right
DistributedSampler, 0 workers: epoch 1 right, epoch 2 right
StatefulDistributedSampler, 2 workers: epoch 1 right, epoch 2 right
StatefulDistributedSampler, 0 workers: epoch 1 [], epoch 2 right"
