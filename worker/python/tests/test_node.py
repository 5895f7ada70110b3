"""Hosts of several processes, which send one model each: emulated on this machine."""

import os

import pytest
import torch
from conftest import SEED, refused
from exact import assert_same_bits, gradients_of, job, parameters_of
from models import Branches, descend, differ, recorded
from torch import distributed, nn

import phub

HOSTS, LOCAL = 2, 2
WORLD = HOSTS * LOCAL


def on_host(rank, local=LOCAL):
    """What a launcher says to this process."""
    os.environ.update(LOCAL_RANK=str(rank % local), LOCAL_WORLD_SIZE=str(local))


def net_of(dtype=torch.float32, width=37):
    """No size is a multiple of two but one; a parameter of one element."""
    torch.manual_seed(SEED)
    net = nn.Sequential(nn.Linear(12, width), nn.Tanh(), nn.Linear(width, 5), nn.PReLU())
    net.append(nn.Linear(5, 4, bias=False))
    return net.to(dtype)


def batch_of(rank, step, dtype=torch.float32):
    random = torch.Generator().manual_seed(SEED + 1000 * step + rank)
    return torch.randn(8, 12, generator=random).to(dtype)


def trains(rank, options, dtype=torch.float32):
    on_host(rank)
    net = net_of(dtype)
    first = parameters_of(net)
    differ(net, rank)
    wrapped, own = recorded(net, node="reduce", **options)
    assert_same_bits(parameters_of(net), first)  # rank 0's
    assert (wrapped.phub.rank, wrapped.phub.world_size) == (rank, WORLD)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    means = []
    for step in range(3):
        optimizer.zero_grad()
        wrapped(batch_of(rank, step, dtype)).square().sum().backward()
        means.append(gradients_of(net))
        optimizer.step()
    wrapped.phub.worker.barrier()
    wrapped.phub.close()
    return own, means


@pytest.mark.parametrize("options", [{}, {"ddp_options": {"bucket_cap_mb": 0.0005}}], ids=str)
def test_gradients_are_the_mean_of_all_ranks(box, start, options):
    own, means = zip(*start(trains, WORLD, options).results(), strict=True)
    for step in range(3):
        for name in own[0][step]:
            found = torch.stack([each[step][name] for each in own])
            torch.testing.assert_close(means[0][step][name], found.mean(0))
            assert not torch.equal(found[0], found[1])
    for each in means[1:]:
        assert_same_bits(each, means[0])
