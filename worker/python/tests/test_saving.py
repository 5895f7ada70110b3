"""A rank reads the optimizer's state while schedules change the rates of the steps."""

import os

import pytest
import torch
from exact import assert_same_bits, exact_roots, mean
from models import loss_of, make_net

import phub

STEPS = 4


def plain(net):
    parameters = [p for p in net.parameters() if p.requires_grad]
    return torch.optim.AdamW(parameters, 1e-2, foreach=False)


def trains(rank, options):
    """Rank 0 saves after each step, and a new rate comes before and after it."""
    net = make_net()
    optimizer = phub.DistributedOptimizer(plain(net), net, **options)
    gradients, saved = [], []
    for step in range(STEPS):
        if rank == 0:
            optimizer.param_groups[0]["lr"] = 1.0
            saved.append(optimizer.state_dict())
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
        optimizer.zero_grad()
        loss_of(net, rank, step).backward()
        gradients.append([p.grad.clone() for p in net.parameters() if p.requires_grad])
        optimizer.step()
    optimizer.synchronize()
    return gradients, dict(net.named_parameters()), saved


@pytest.mark.parametrize("overlap", ["backward", "forward", False])
def test_a_rate_may_change_after_a_rank_has_saved(box, start, overlap):
    ranks = start(trains, 2, {"overlap": overlap}).results()
    net = make_net()
    optimizer = plain(net)
    with exact_roots():
        for step in range(STEPS):
            saved = ranks[0][2][step]["state"]
            assert all(of["step"] == step for of in saved.values())
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
            of_ranks = zip(*(gradients[step] for gradients, _, _ in ranks), strict=True)
            for parameter, given in zip(optimizer.param_groups[0]["params"], of_ranks, strict=True):
                parameter.grad = mean(given)
            optimizer.step()
    for _, parameters, _ in ranks:
        assert_same_bits(parameters, dict(net.named_parameters()))


def begins_with_state(rank):
    net = make_net()
    local = plain(net)
    loss_of(net, 0, 0).backward()
    local.step()
    optimizer = phub.DistributedOptimizer(local, net)
    torch.optim.lr_scheduler.LinearLR(optimizer, 0.1)  # it sets the first rate now
    optimizer.zero_grad()
    loss_of(net, rank, 1).backward()
    optimizer.step()
    state = optimizer.state_dict()["state"]
    return [int(of["step"]) for of in state.values()], optimizer.param_groups[0]["lr"]


def test_a_scheduler_of_an_optimizer_that_has_state_sets_the_first_rate(box, start):
    for steps, rate in start(begins_with_state, 2, PHUB_JOB=os.environ["PHUB_JOB"]).results():
        assert rate == pytest.approx(1e-3)
        assert set(steps) == {2}
