"""Rounds with a quorum: a rank that is late holds nobody up."""

import time

import torch
from conftest import refused
from torch import nn

import phub

ROUNDS = 60


def trains(rank):
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = phub.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.02), model, job="late", quorum=2, grace_ms=1
    )
    generator = torch.Generator().manual_seed(rank)
    steps, losses = 0, []
    while optimizer.worker.round("weight") < ROUNDS:
        if rank == 2:
            time.sleep(0.05)
        inputs = torch.randn(16, 8, generator=generator)
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        steps += 1
        losses.append(loss.item())
    optimizer.close()
    return steps, losses[0], losses[-1]


def test_a_slow_rank_misses_rounds_and_all_learn(box, start):
    first, second, slow = start(trains, 3).results()
    assert slow[0] < min(first[0], second[0])
    for _, loss_at_first, loss in (first, second, slow):
        assert loss < loss_at_first / 4


def uses(rank):
    model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = phub.DistributedOptimizer(inner, model, job="uses", quorum=1)
    refused("are at different steps", lambda: next(iter(optimizer.steps(3))))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    inner.param_groups[0]["lr"] = 0.05
    refused("0.1 to 0.05 in a job with a quorum", model(torch.ones(1, 2)).sum().backward)
    optimizer.close()


def test_what_goes_by_steps_is_refused(box, start):
    start(uses, 1).results()
    model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    for form in ({"server": False}, {"factors": "auto"}):
        refused("quorum", phub.DistributedOptimizer, inner, model, quorum=1, **form)
