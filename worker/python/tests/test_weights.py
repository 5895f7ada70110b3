"""Gradients with weights: the mean of a step is that of all samples, however many each rank has."""

import pytest
import torch
from conftest import refused
from torch import nn

import phub

STEPS = 8
RANKS = 3


def made(rank, step):
    """The samples of a rank in a step: another number in each."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    count = 1 + (7 * rank + 5 * step) % 11
    return torch.randn(count, 6, generator=generator, dtype=torch.float64)


def loss_of(model, samples):
    return (model(samples) - samples.sum(1, keepdim=True)).square().mean()


def model_of():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 1))


def trains(rank, options):
    model = model_of()
    optimizer = phub.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.05), model, job="weighs", weights="yes", **options
    )
    losses = []
    for step in range(STEPS):
        samples = made(rank, step).float()
        optimizer.zero_grad()
        optimizer.weight(len(samples))
        losses.append(loss_of(model, samples).item())
        loss_of(model, samples).backward()
        optimizer.step()
    optimizer.close()
    return [parameter.detach().double() for parameter in model.parameters()], losses


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({}, 1e-6),
        ({"overlap": "forward"}, 1e-6),
        ({"server": False}, 1e-6),
        ({"zero_copy": True}, 1e-6),
        ({"transport": "tcp", "quorum": RANKS, "late_decay": 0.5}, 1e-6),
        ({"gradient_dtype": "bf16"}, 1e-2),
        ({"formats": {"*": "int8"}, "max_norm": 1e6}, 1e-2),
    ],
)
def test_a_mean_is_of_all_samples(box, start, options, tolerance):
    alone = model_of().double()
    optimizer = torch.optim.SGD(alone.parameters(), 0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(alone, torch.cat([made(rank, step) for rank in range(RANKS)])).backward()
        optimizer.step()
    for parameters, _ in start(trains, RANKS, options).results():
        for found, wanted in zip(parameters, alone.parameters(), strict=True):
            torch.testing.assert_close(found, wanted.detach(), rtol=tolerance, atol=tolerance)


def pushes(rank):
    with phub.Worker({"a": 4}, job="weighs", reduction="mean", weights="yes") as worker:
        gradient = torch.frombuffer(worker.gradient("a"), dtype=torch.float32)
        gradient.fill_(rank)
        worker.weight(1 + 2 * rank)
        worker.push("a")
        worker.wait("a")
        found = torch.frombuffer(bytearray(worker.parameters("a")), dtype=torch.float32).tolist()
        for wrong in (0, -1, float("nan"), float("inf"), 1e-39):
            refused(r"must be finite and at least 2\^-126", worker.weight, wrong)
        refused("it must be a number", worker.weight, "2")
        worker.barrier()
    return found


def test_a_worker_has_a_weight(box, start):
    for found in start(pushes, 2).results():
        assert found == [0.75] * 4  # (0 · 1 + 1 · 3) / 4


def misuses(rank):
    model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = phub.DistributedOptimizer(inner, model, job="misuses")
    refused("has no weights", optimizer.weight, 2)
    optimizer.close()
    weighs = phub.DistributedOptimizer(inner, model, job="late", weights="yes")
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="too late for this step"):
        weighs.weight(2)
    weighs.step()
    weighs.weight(2)
    weighs.close()


def test_what_goes_wrong_is_said(box, start):
    start(misuses, 1).results()
    refused("int32", phub.Worker, {"a": 4}, job="int32", weights="yes", gradient_dtype="int32")
