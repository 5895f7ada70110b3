"""Rounds with a quorum: a rank that is late holds nobody up."""

import time

import torch
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
    assert first[0] + second[0] >= 2 * ROUNDS - 10
    assert slow[0] <= ROUNDS / 2
    for _, loss_at_first, loss in (first, second, slow):
        assert loss < loss_at_first / 4
